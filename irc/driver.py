"""From a source to an artifact folder, and from an artifact folder to something that runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from . import __version__
from .artifact import MODULE, REPORT, Manifest, check, is_artifact, read_manifest, write_manifest
from .atomic import whole_folder
from .core import Module
from .dtypes import is_float
from .errors import Error, did_you_mean
from .mesh import Mesh
from .report import page
from .text import parse_module
from .text.printer import print_module
from .verify import verify as verify_module
from .weights import ConcatRef, Ref, UnboundRef

if TYPE_CHECKING:
    from .backends.base import Backend
    from .generation.model import Model
    from .pipeline import Instrument, Step

PathLike: TypeAlias = str | os.PathLike[str]
Dims: TypeAlias = Mapping[str, tuple[int, int, int]]
Progress: TypeAlias = Callable[[str, float], None]  # what is being done, the fraction done


@dataclass
class Source:
    """A module before any pass, and the folder of the checkpoint it was bound to, if any."""

    module: Module
    checkpoint: Path | None = None


@dataclass
class Prepared:
    """A module that a backend can write, and how it came about."""

    source: Source
    backend: Backend
    pipeline: str
    steps: list[Step] = field(default_factory=list["Step"])

    @property
    def module(self) -> Module:
        """The module after all passes."""
        return self.source.module


class Artifact:
    """A compiled folder. Nothing is loaded before the first run."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @cached_property
    def module(self) -> Module:
        """The module that was compiled, after all passes."""
        path = self.folder / MODULE
        return parse_module(path.read_text(encoding="utf-8"), str(path))

    @cached_property
    def model(self) -> Model:
        """The loaded program of the backend it was compiled for."""
        from .backends import get

        program = get(self.manifest["backend"]).load(self.folder, self.manifest)
        return self._model(program)

    @cached_property
    def reference(self) -> Model:
        """The module run by the reference backend, whatever it was compiled for."""
        from .backends.reference import ReferenceProgram

        return self._model(ReferenceProgram(self.module, self.folder))

    def _model(self, program: Any) -> Model:
        from .generation.model import Model

        manifest = self.manifest
        return Model(program, manifest["dims"], self.folder, manifest.get("end_tokens", ()))

    def run(self, inputs: Mapping[str, object]) -> dict[str, Any]:
        """The outputs by name, as arrays; a language model needs `input_ids` [B, S] alone."""
        return self.model.run(inputs)

    def generate(self, prompt: str, max_new_tokens: int = 100) -> str:
        """The text that a language model lets follow on `prompt`, chosen greedily."""
        return self.model.generate(prompt, max_new_tokens)

    def __repr__(self) -> str:
        return f"<artifact {self.folder} for {self.manifest['backend']}>"


def load(folder: PathLike) -> Artifact:
    """The artifact in a folder; an Error where a file of it, or a weight file, has changed."""
    path = Path(folder)
    manifest = read_manifest(path)
    check(path, manifest)
    return Artifact(path, manifest)


def compile(
    src: PathLike | Module,
    output: PathLike,
    *,
    mesh: str = "",
    backend: str = "onnx",
    checkpoint: PathLike | None = None,
    pipeline: str | None = None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    dims: Dims | None = None,
    random_weights: int | None = None,
    bundle: bool = False,
    instruments: Sequence[Instrument] | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Compile a script, a checkpoint folder, a module file or a module into the folder `output`.

    The folder appears whole or not at all. Weights stay in the checkpoint and are referred to;
    with `bundle` they are copied into the folder. Other options are those of `prepare`.
    """
    prepared = prepare(
        src,
        mesh=mesh,
        backend=backend,
        checkpoint=checkpoint,
        pipeline=pipeline,
        dtype=dtype,
        settings=settings,
        dims=dims,
        random_weights=random_weights,
        instruments=instruments,
        progress=progress,
    )
    return write(prepared, output, bundle=bundle, progress=progress)


def prepare(
    src: PathLike | Module,
    *,
    mesh: str = "",
    backend: str = "onnx",
    checkpoint: PathLike | None = None,
    pipeline: str | None = None,
    dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
    dims: Dims | None = None,
    random_weights: int | None = None,
    instruments: Sequence[Instrument] | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Everything before a file is written: the module, its weights bound, all passes run.

    `pipeline` is the text of the passes (None: the backend's own). `settings` are the keyword
    arguments of a script's factory. `dims` replaces ranges of symbols: (min, typical, max).
    `random_weights` is a seed, for weights that no checkpoint gives. `instruments` watch the
    passes (None: each is verified).
    """
    from . import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from .backends import get
    from .backends.base import report
    from .pipeline import run_pipeline

    tell = progress or _silent
    target = get(backend)
    _one_rank(Mesh.parse(mesh))
    tell("reading the model", 0.0)
    source = find_source(src, checkpoint, dtype, settings or {}, random_weights)
    module = source.module
    _one_rank(module.mesh)
    set_dims(module, dims or {})
    verify_module(module)
    _check_bound(module)
    tell("running passes", 0.0)
    text = target.default_pipeline if pipeline is None else pipeline
    steps = run_pipeline(module, text, instruments)
    gaps = target.unsupported(module)
    if gaps:
        raise report(gaps, backend)
    return Prepared(source, target, text, steps)


def write(
    prepared: Prepared,
    output: PathLike,
    *,
    bundle: bool = False,
    progress: Progress | None = None,
) -> Artifact:
    """Write the artifact folder of a prepared module."""
    tell = progress or _silent
    module, backend = prepared.module, prepared.backend
    with whole_folder(Path(output), is_artifact) as folder:
        tell("writing weights" if bundle else "writing the program", 0.0)
        emitted = backend.emit(module, folder, {"base": "/", "bundle": bundle})
        facts = _facts(prepared) | dict(emitted)
        (folder / MODULE).write_text(print_module(module, locs=True), encoding="utf-8")
        _copy_tokenizer(prepared.source.checkpoint, folder)
        rows = [(str(step), str(step.stats)) for step in prepared.steps]
        (folder / REPORT).write_text(page(module, facts, rows), encoding="utf-8")
        tell("computing checksums", 0.0)
        outside = {} if bundle else {path: Path(path) for path in used_files(module)}
        manifest = write_manifest(folder, facts, outside)
    return Artifact(Path(output), manifest)


def run_passes(module: Module, pipeline: str) -> list[Step]:
    """Run the passes that `pipeline` names over a module, in place; a Step tells what each did."""
    from . import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from .pipeline import run_pipeline

    return run_pipeline(module, pipeline)


def open_model(place: PathLike, backend: str | None = None) -> Model:
    """What `irc run` and `irc generate` run: an artifact, or a module file by the reference."""
    path = Path(place)
    if path.is_file():
        if backend != "reference":
            raise Error(
                f"{path} is not compiled; compile it with irc compile {path} -o DIR, "
                "or let --backend reference interpret it"
            )
        return _interpreted(path)
    artifact = load(path)
    if backend in (None, artifact.manifest["backend"]):
        return artifact.model
    if backend == "reference":
        return artifact.reference
    from .backends import get

    get(str(backend))
    raise Error(
        f"{path} is compiled for {artifact.manifest['backend']}; "
        f"compile it again with --backend {backend}"
    )


def _interpreted(path: Path) -> Model:
    from .backends.reference import ReferenceProgram
    from .generation.model import Model

    module = read_module_file(path)
    verify_module(module)
    return Model(ReferenceProgram(module, path.parent), module.dims, path.parent)


def read_module_file(path: Path) -> Module:
    """The module in a text file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Error(f"{path} is no text in UTF-8 (byte {error.start} is not)") from None
    return parse_module(text, str(path))


def set_dims(module: Module, dims: Dims) -> None:
    """Replace ranges of symbols that a module has."""
    for name, bounds in dims.items():
        if module.dims and name not in module.dims:
            raise Error(
                f"the model has no dimension {name!r}{did_you_mean(name, module.dims)}; "
                f"it has {', '.join(module.dims)}"
            )
        if not 0 <= bounds[0] <= bounds[1] <= bounds[2]:
            low, typical, high = bounds
            raise Error(f"the range {name}={low}:{typical}:{high} must rise: min:typical:max")
        module.dims[name] = bounds


def used_files(module: Module) -> list[str]:
    """The paths of the checkpoint files that weights refer to, each once, in order."""
    names = dict.fromkeys(name for w in module.weights.values() for name in w.ref.files())
    return [module.files[name] for name in names]


def _one_rank(mesh: Mesh) -> None:
    if mesh.ranks > 1:
        raise Error(
            f"the mesh ({mesh}) has {mesh.ranks} ranks, and this version of irc compiles one; "
            "leave --mesh out"
        )


def _check_bound(module: Module) -> None:
    """An Error that names the weights without values."""
    lost = [w.name for w in module.weights.values() if any(map(_is_unbound, _sources(w.ref)))]
    if lost:
        shown = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise Error(
            f"{len(lost)} weights have no values ({shown}): "
            "give --checkpoint DIR, or --random-weights SEED"
        )


def _is_unbound(ref: Ref) -> bool:
    return isinstance(ref, UnboundRef)


def _sources(ref: Ref) -> Iterable[Ref]:
    if not isinstance(ref, ConcatRef):
        return (ref,)
    return [source for part in ref.parts for source in _sources(part)]


def _facts(prepared: Prepared) -> dict[str, Any]:
    """What the manifest says before the backend adds its own."""
    from .backends.base import ports_of

    module = prepared.module
    ports = ports_of(module.main)
    facts: dict[str, Any] = {
        "irc": __version__,
        "name": module.name,
        "backend": prepared.backend.name,
        "mesh": str(module.mesh),
        "pipeline": prepared.pipeline,
        "dtype": _dtype(module),
        "dims": {name: list(bounds) for name, bounds in module.dims.items()},
    }
    for kind in ("inputs", "states", "outputs"):
        facts[kind] = [
            {"name": port.name, "dtype": port.dtype, "shape": [str(d) for d in port.shape]}
            for port in getattr(ports, kind)
        ]
    if prepared.source.checkpoint is not None:
        from .generation.tokenizer import end_tokens

        facts["end_tokens"] = end_tokens(prepared.source.checkpoint)
    return facts


def _dtype(module: Module) -> str:
    """The dtype of most float weights; of a module without any, of its first float argument."""
    counts: dict[str, int] = {}
    for weight in module.weights.values():
        counts[weight.type.dtype] = counts.get(weight.type.dtype, 0) + 1
    for arg in module.main.args:
        counts.setdefault(arg.type.dtype, 0)
    floats = {kind: count for kind, count in counts.items() if is_float(kind)}
    return max(floats, key=lambda kind: floats[kind], default="")


def _copy_tokenizer(checkpoint: Path | None, folder: Path) -> None:
    from .generation.tokenizer import FILES

    for name in FILES if checkpoint is not None else ():
        origin = (checkpoint or folder) / name
        if origin.is_file():
            shutil.copyfile(origin, folder / name)


def _silent(stage: str, fraction: float) -> None:
    """Nobody watches."""
