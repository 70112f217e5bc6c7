"""Compiling: source, passes, the program of a backend, and the artifact folder around it."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..analysis.idle_axes import idle_axes
from ..argument_checks import check_path
from ..artifact.atomic import whole_folder
from ..artifact.bundle import bundled
from ..artifact.folder import ArtifactFolder
from ..artifact.manifest import (
    BUNDLE,
    CERTIFICATE,
    INPUT,
    MODULE,
    REPORT,
    Progress,
    is_replaceable,
    silent,
    write_manifest,
)
from ..errors import Error
from ..files import stays_in
from ..ir.core import Module
from ..ir.dtypes import is_float
from ..ir.types import TensorType
from ..ir.verify import verify
from ..page.tables import report
from ..pipeline import Pipeline, run_pipeline
from ..pipeline.instruments import History
from ..pipeline.run import VerifyEach
from ..pipeline.text import DEFAULT, extends_default
from ..quantization.report import QuantizationReport
from ..text.printer import print_module
from ..weights import UnboundRef
from .checkpoint_notes import checkpoint_notes
from .load import Artifact
from .options import begin, checked_options, chosen_backend, source_options
from .pipelines import chosen_pipeline
from .quantization import calibrated, check_done, explain_refusal
from .sources import PathLike, Source, find_source

if TYPE_CHECKING:
    from ..backends.base import Backend, Emitted
    from ..pipeline import Instrument, Step


@dataclass
class Prepared:
    """A module that a backend can write, and how it was made; `input` is its text before passes.

    `certificate` is what is proved of the passes, None unless it was asked for.
    """

    source: Source
    input: str
    backend: Backend
    pipeline: Pipeline
    steps: list[Step]
    quantization: QuantizationReport
    bundle: bool
    certificate: dict[str, Any] | None = None

    @property
    def module(self) -> Module:
        """The module after all passes."""
        return self.source.module


def compile(src: PathLike | Module, output: PathLike, **options: Any) -> Artifact:
    """Compile a script, a checkpoint folder, a module's text or a module into a folder.

    The folder appears complete or not at all. Weights stay in the checkpoint; with `bundle` they
    are copied into the folder, which then needs no other file. The options are those of
    `irc compile --help`, with `_` for `-`: they belong to CompileOptions in irc.driver.options, to
    passes and to backends. Without `instruments`, which observe the passes, the module is verified
    after each. `progress` is called with each stage and the fraction done.
    """
    check_path("the folder to write", output)
    return write(prepare(src, output, **options), output, progress=options.get("progress"))


def prepare(src: PathLike | Module, output: PathLike | None = None, **options: Any) -> Prepared:
    """Source and passes: the module, its weights bound, verified, all passes run.

    Nothing is written but a calibration, beside the folder `output`.
    """
    options = checked_options(options)
    progress = options.get("progress") or silent
    progress("reading the model", 0.0)
    begin(options)
    source = find_source(src, **source_options(options))
    verify(source.module)
    _check_bound(source.module)
    backend = chosen_backend(source, options)
    pipeline = chosen_pipeline(backend, source, options)
    pipeline = calibrated(pipeline, source, output, progress)
    before = print_module(source.module, locs=True)
    progress("running passes", 0.0)
    steps, report, certificate = _run(source.module, pipeline, options)
    _check_backend(backend, source.module, pipeline)
    bundle = options.get("bundle", False) or backend.needs_bundle
    return Prepared(source, before, backend, pipeline, steps, report, bundle, certificate)


def _run(
    module: Module, pipeline: Pipeline, options: Mapping[str, Any]
) -> tuple[list[Step], QuantizationReport, dict[str, Any] | None]:
    """Run the passes, and prove them if asked to; an Error where nothing was quantized."""
    report = QuantizationReport(errors=options.get("weight_errors", False))
    given = options.get("instruments")
    histories = [History()] if options.get("prove") else []
    instruments = [*([VerifyEach()] if given is None else given), report, *histories]
    steps = run_pipeline(module, pipeline, instruments, verified=True)
    if extends_default(options.get("pipeline", DEFAULT)):
        check_done(pipeline, module, report)
    if not histories:
        return steps, report, None
    from ..proof import certify

    return steps, report, certify(histories[0])


def _check_backend(backend: Backend, module: Module, pipeline: Pipeline) -> None:
    """An Error about operations that the backend cannot run."""
    from ..backends.base import check_supported

    try:
        check_supported(backend, module)
    except Error as error:
        explain_refusal(error, backend, module, pipeline)
        raise


def check(prepared: Prepared) -> list[str]:
    """Raise the errors that `write` would raise before it builds engines; nothing is written.

    Returns notes for the user.
    """
    return [*_notes(prepared), *prepared.backend.check(prepared.module, Path())]


def run_passes(
    module: Module,
    pipeline: str,
    instruments: Sequence[Instrument] | None = None,
    *,
    verified: bool = False,
) -> list[Step]:
    """Run the passes that the text names over a module, in place; returns a Step for each.

    A module that is not yet `verified` is verified first.
    """
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)

    return run_pipeline(module, pipeline, instruments, verified=verified)


def write(prepared: Prepared, output: PathLike, *, progress: Progress | None = None) -> Artifact:
    """Emit the program of a prepared module into its folder; see `compile` for the rest."""
    progress = progress or silent
    path, module, bundle = Path(output), prepared.module, prepared.bundle
    refs = [] if bundle else [weight.ref for weight in module.weights.values()]
    used = dict.fromkeys(module.files[name] for ref in refs for name in ref.files())
    files = {file: Path(file) for file in used}
    _check_kept(files.values(), path)
    with whole_folder(path, is_replaceable) as folder:
        copying = partial(progress, "copying the weights")
        with bundled(module, folder / BUNDLE, copying) if bundle else nullcontext("") as hash:
            emitted = _emit(prepared, folder, progress)
            left_out = _copy_tokenizer(prepared.source, folder)
        facts = {**_facts(prepared, folder), "program": dict(emitted.facts)}
        prepared.backend.finish(folder, facts)
        hashes = {**emitted.hashes, **({BUNDLE: hash} if hash else {})}
        manifest = write_manifest(folder, facts, files, progress, hashes)
    notes = [*_notes(prepared), *emitted.notes, *left_out]
    return Artifact(ArtifactFolder(path, manifest), notes=notes)


def _notes(prepared: Prepared) -> list[str]:
    """Sentences about idle ranks, unused files of a checkpoint, and what is not proved."""
    notes = [*idle_axes(prepared.module), *checkpoint_notes(prepared.source)]
    if prepared.certificate is not None:
        others = prepared.certificate["not_certified"]
        except_for = f" but {', '.join(others)}" if others else ""
        how = f"proved, or supported by random numbers: {CERTIFICATE}"
        notes.append(f"every pass{except_for} keeps what the model computes ({how})")
    return notes


def _emit(prepared: Prepared, folder: Path, progress: Progress) -> Emitted:
    """Write everything but the manifest into the folder."""
    module = prepared.module
    progress("writing the program", 0.0)
    emitted = prepared.backend.emit(module, folder, base=folder, progress=progress)
    (folder / INPUT).write_text(prepared.input, encoding="utf-8")
    (folder / MODULE).write_text(print_module(module, locs=True), encoding="utf-8")
    if prepared.certificate is not None:
        text = json.dumps(prepared.certificate, indent=1) + "\n"
        (folder / CERTIFICATE).write_text(text, encoding="utf-8")
    rows = [(str(step), str(step.stats)) for step in prepared.steps]
    text = report(module, _facts(prepared, folder), rows, prepared.quantization.table())
    (folder / REPORT).write_text(text, encoding="utf-8")
    return emitted


def _check_kept(weights: Iterable[Path], output: Path) -> None:
    """An Error where the folder to replace holds weights that the new one refers to."""
    for path in weights:
        if Path(os.path.realpath(output)) in Path(os.path.realpath(path)).parents:
            instead = "choose another folder with -o"
            instead += ", or give --bundle to copy them" if is_replaceable(output) else ""
            raise Error(f"{output} would be replaced, and with it the weights in {path}; {instead}")


def _check_bound(module: Module) -> None:
    """An Error that names the weights without values."""
    unbound = [
        weight.name
        for weight in module.weights.values()
        if any(isinstance(source, UnboundRef) for source in weight.ref.sources())
    ]
    if unbound:
        shown = ", ".join(unbound[:3]) + ", ..." * (len(unbound) > 3)
        why = f"{len(unbound)} of {len(module.weights)} weights have no values ({shown})"
        raise Error(f"{why}: give --checkpoint DIR, or --random-weights SEED")


def _facts(prepared: Prepared, folder: Path) -> dict[str, Any]:
    """The manifest's entries before those of the backend."""
    from ..backends.base import ports_of

    module = prepared.module
    return {
        "irc": __version__,
        "name": module.name,
        "backend": prepared.backend.name,
        "mesh": str(module.mesh),
        "pipeline": _from_folder(prepared.pipeline, folder),
        "dtype": _dtype(module),
        "dims": {name: list(bounds) for name, bounds in module.dims.items()},
        **{
            kind: {port.name: str(TensorType(port.dtype, port.shape)) for port in ports}
            for kind, ports in vars(ports_of(module.main)).items()
        },
        "end_tokens": prepared.source.end_tokens,
    }


def _from_folder(pipeline: Pipeline, folder: Path) -> str:
    """A pipeline whose plans are named from `folder`, as weights are, wherever both lie."""
    from ..passes.shard.plan import DEFAULT

    passes: list[Any] = [*pipeline]
    for i, pass_ in enumerate(passes):
        plan = getattr(pass_, "plan", DEFAULT)
        if isinstance(plan, str) and plan != DEFAULT and os.path.isfile(plan):
            passes[i] = replace(pass_, plan=os.path.relpath(plan, folder))
    return str(Pipeline(tuple(passes)))


def _dtype(module: Module) -> str:
    """The dtype of most float weights; of a module without any, of its first float argument."""
    counts = Counter(weight.type.dtype for weight in module.weights.values())
    counts.update({arg.type.dtype: 0 for arg in module.main.args})
    return next((kind for kind, _ in counts.most_common() if is_float(kind)), "")


def _copy_tokenizer(source: Source, folder: Path) -> list[str]:
    """Copy the files of a tokenizer; a note for each that a link out of the source's folder is."""
    from ..generation.tokenizer import FILES

    origin, notes = source.folder, list[str]()
    if origin is None:
        return notes
    for path in [path for name in FILES for path in sorted(origin.glob(name)) if path.is_file()]:
        if source.trust or stays_in(path, origin):
            copy = folder / path.relative_to(origin)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
            continue
        notes.append(
            f"{path} was not copied: it is a link to {os.path.realpath(path)}, outside the folder; "
            "put the file there, or give --trust if you trust who made the link"
        )
    return notes
