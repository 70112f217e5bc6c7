"""Compiling: source, passes, what the backend writes, and the folder around it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .. import __version__
from ..analysis.idle_axes import idle_axes
from ..artifact import BUNDLE, MODULE, REPORT, Progress, is_artifact, silent, write_manifest
from ..atomic import whole_folder
from ..bundle import bundled
from ..core import Module
from ..dtypes import is_float
from ..errors import Error
from ..given import check_path
from ..report import page
from ..text.printer import print_module
from ..types import TensorType
from ..verify import verify
from ..weights import UnboundRef
from .load import Artifact
from .options import Options, backend_of
from .pipelines import Parallel, chosen_pipeline
from .sources import PathLike, Source, find_source

if TYPE_CHECKING:
    from ..backends.base import Backend, Ports
    from ..pipeline import Instrument, Step


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


def compile(
    src: PathLike | Module, output: PathLike, *, bundle: bool = False, **options: Unpack[Options]
) -> Artifact:
    """Compile a script, a checkpoint folder, a module's text or a module into a folder.

    The folder appears whole or not at all. Weights stay in the checkpoint and are referred to;
    with `bundle` they are copied into the folder, which then needs nothing else. See `Options` for
    the rest.
    """
    check_path("the folder to write", output)
    prepared = prepare(src, **options)
    return write(prepared, output, bundle=bundle, progress=options.get("progress"))


def prepare(src: PathLike | Module, **options: Unpack[Options]) -> Prepared:
    """Everything before a file is written: the module, its weights bound, all passes run."""
    from ..backends.base import report

    tell = options.get("progress") or silent
    backend = backend_of(src, options)
    tell("reading the model", 0.0)
    source = find_source(
        src,
        options.get("checkpoint"),
        options.get("dtype"),
        options.get("settings"),
        options.get("dims"),
        options.get("random_weights"),
    )
    module = source.module
    verify(module)
    _check_bound(module)
    tell("running passes", 0.0)
    given = options.get("pipeline")
    pipeline = chosen_pipeline(backend, module, Parallel.of(options), given, source.folder)
    steps = run_passes(module, pipeline, options.get("instruments"))
    gaps = backend.unsupported(module)
    if gaps:
        raise report(gaps, backend.name)
    return Prepared(source, backend, pipeline, steps)


def check(prepared: Prepared) -> list[str]:
    """Raise what `write` would about the module before it builds engines; nothing is written.

    Returns sentences for the user.
    """
    checked = getattr(prepared.backend, "check", None)
    notes: list[str] = [] if checked is None else checked(prepared.module, {"base": Path()})
    return [*idle_axes(prepared.module), *notes]


def run_passes(
    module: Module, pipeline: str, instruments: Sequence[Instrument] | None = None
) -> list[Step]:
    """Run the passes that the text names over a module, in place; a Step tells what each did."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline import run_pipeline

    return run_pipeline(module, pipeline, instruments)


def write(
    prepared: Prepared,
    output: PathLike,
    *,
    bundle: bool = False,
    progress: Progress | None = None,
) -> Artifact:
    """Write the artifact folder of a prepared module; see `compile` for `bundle`."""
    tell = progress or silent
    module = prepared.module
    outside = {} if bundle else {path: Path(path) for path in _used_files(module)}
    _check_kept(outside.values(), Path(output))
    with whole_folder(Path(output), is_artifact) as folder:
        copying = partial(tell, "copying the weights")
        with bundled(module, folder / BUNDLE, copying) if bundle else nullcontext():
            facts = _write_program(prepared, folder, Path(output), tell)
        notes = facts["program"].pop("notes", [])
        known = facts["program"].pop("hashes", None)
        manifest = write_manifest(folder, facts, outside, tell, known)
    finish = getattr(prepared.backend, "finish", None)
    notes += [] if finish is None else finish(Path(output), manifest)
    return Artifact(Path(output), manifest, notes=[*idle_axes(module), *notes])


def _write_program(
    prepared: Prepared, folder: Path, output: Path, tell: Progress
) -> dict[str, Any]:
    """Everything but the manifest, in a folder that becomes `output`; returns what that says."""
    module = prepared.module
    tell("writing the program", 0.0)
    options = {"base": folder, "output": output, "progress": tell}
    emitted = prepared.backend.emit(module, folder, options)
    facts = {**_facts(prepared), "program": dict(emitted)}
    (folder / MODULE).write_text(print_module(module, locs=True), encoding="utf-8")
    _copy_tokenizer(prepared.source.folder, folder)
    rows = [(str(step), str(step.stats)) for step in prepared.steps]
    (folder / REPORT).write_text(page(module, facts, rows), encoding="utf-8")
    return facts


def _check_kept(weights: Iterable[Path], output: Path) -> None:
    """An Error where the older folder holds weights that the new one only refers to."""
    for path in weights:
        if Path(os.path.realpath(output)) in Path(os.path.realpath(path)).parents:
            raise Error(
                f"{output} would be replaced, and with it the weights in {path}; "
                "choose another folder with -o, or give --bundle to copy them"
            )


def _check_bound(module: Module) -> None:
    """An Error that names the weights without values."""
    lost = [
        weight.name
        for weight in module.weights.values()
        if any(isinstance(source, UnboundRef) for source in weight.ref.sources())
    ]
    if lost:
        shown = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise Error(
            f"{len(lost)} of {len(module.weights)} weights have no values ({shown}): "
            "give --checkpoint DIR, or --random-weights SEED"
        )


def _used_files(module: Module) -> list[str]:
    """The paths of the checkpoint files that weights refer to, each once, in order."""
    names = dict.fromkeys(name for w in module.weights.values() for name in w.ref.files())
    return [module.files[name] for name in names]


def _facts(prepared: Prepared) -> dict[str, Any]:
    """What the manifest says before the backend adds its own."""
    from ..backends.base import ports_of

    module = prepared.module
    return {
        "irc": __version__,
        "name": module.name,
        "backend": prepared.backend.name,
        "mesh": str(module.mesh),
        "pipeline": prepared.pipeline,
        "dtype": _dtype(module),
        "dims": {name: list(bounds) for name, bounds in module.dims.items()},
        **_described(ports_of(module.main)),
        "end_tokens": prepared.source.ends,
    }


def _described(ports: Ports) -> dict[str, dict[str, str]]:
    groups = {"inputs": ports.inputs, "states": ports.states, "outputs": ports.outputs}
    return {
        kind: {port.name: str(TensorType(port.dtype, port.shape)) for port in group}
        for kind, group in groups.items()
    }


def _dtype(module: Module) -> str:
    """The dtype of most float weights; of a module without any, of its first float argument."""
    counts: dict[str, int] = {}
    for weight in module.weights.values():
        counts[weight.type.dtype] = counts.get(weight.type.dtype, 0) + 1
    for arg in module.main.args:
        counts.setdefault(arg.type.dtype, 0)
    floats = [kind for kind in counts if is_float(kind)]
    return max(floats, key=lambda kind: counts[kind], default="")


def _copy_tokenizer(origin: Path | None, folder: Path) -> None:
    from ..generation.tokenizer import FILES

    if origin is None:
        return
    for name in FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
