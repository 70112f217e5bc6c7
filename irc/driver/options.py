"""The options of a compilation, and the backend that they choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from ..argument_checks import check_kind
from ..artifact.folder import ArtifactFolder
from ..artifact.manifest import Progress
from ..errors import Error, did_you_mean
from ..ir.dims import Dims
from .sources import PathLike

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..pipeline import Instrument


class Options(TypedDict, total=False):
    """The options of a compilation; all have defaults.

    `mesh`: axes of ranks, as in "tp=2" or {"tp": 2}; `plan`, `sequence`, `embedding`, `outside` and
    `next_tokens` shard a module over them, see `Parallel`. `quantize`, `group`, `include`,
    `exclude`, `kv_cache`, `calibration`, `observer` and `budget` quantize it, see `Quantization`;
    with `weight_errors` the report has the error of every weight. `backend`: by default that of an
    artifact, else "onnx". `checkpoint`: the folder of a script's weights. `pipeline`: the passes as
    text, by default those of the backend. `dtype`: f32, f16 or bf16. `settings`: keyword arguments
    of a script's factory. `engine`: options of TensorRT engines, see `EngineOptions` in
    irc.backends.tensorrt.options, by default those of an artifact. `dims`: ranges (min, typical,
    max) of symbols. `random_weights`: a seed, in place of a checkpoint. `instruments` observe the
    passes; without them the module is verified after each. `progress` is called with each stage and
    the fraction done. `trust`: weights are also copied from files that the source names outside its
    folder, see decision 0019.
    """

    mesh: str | Mapping[str, int]
    plan: PathLike
    sequence: bool
    embedding: str
    outside: str
    next_tokens: bool
    quantize: PathLike | Mapping[str, Any]
    group: int
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    kv_cache: str
    calibration: PathLike
    observer: str
    budget: str
    weight_errors: bool
    backend: str
    checkpoint: PathLike | None
    pipeline: str | None
    dtype: str | None
    settings: Mapping[str, Any]
    engine: Mapping[str, Any]
    dims: Dims
    random_weights: int | None
    instruments: Sequence[Instrument] | None
    progress: Progress | None
    trust: bool


def selected(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The options of these names that are present."""
    return {name: options[name] for name in names if name in options}


_TEXTS = {  # the options that are text, and examples
    "backend": 'its name, such as "onnx"',
    "pipeline": 'the passes as text, such as "cse, dce"',
    "embedding": 'the name of a scheme, such as "auto"',
    "outside": 'one of "zero", "clamp", "row:k", "error"',
}


def backend_of(artifact: ArtifactFolder | None, options: Options) -> Backend:
    """The backend with its options of engines; an Error where an option is unknown.

    An `artifact` that is compiled again keeps its backend and options by default.
    """
    from ..backends import get

    for name in options:
        if name not in Options.__annotations__:
            near = did_you_mean(name, Options.__annotations__)
            raise Error(f"irc.compile has no option {name}{near}")
    for name, wanted in _TEXTS.items():
        check_kind(name, options.get(name) or "", str, wanted)
    engine = options.get("engine") or {}
    check_kind("engine", engine, Mapping, "a mapping, such as {'weights': 'inside'}")
    before = "onnx" if artifact is None else artifact.backend
    remembered = artifact.engines.get("engine", {}) if artifact else {}
    return get(options.get("backend") or before).configured(engine, remembered)
