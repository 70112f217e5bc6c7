"""What may be chosen about a compilation, and the backend that comes of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

from ..artifact import Progress, is_artifact, read_manifest
from ..core import Module
from ..dims import Dims
from ..errors import Error, did_you_mean
from ..given import check_kind
from .sources import PathLike

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..pipeline import Instrument


class Options(TypedDict, total=False):
    """What may be chosen about a compilation; everything may be left out.

    `mesh`: axes of ranks, as in "tp=2" or {"tp": 2}; `plan`, `sequence`, `embedding`, `outside` and
    `next_tokens` say how a module is spread over them, see `Parallel`. `backend`: that of an
    artifact, else "onnx", unless given. `checkpoint`: the folder of a script's weights. `pipeline`:
    the passes as text, those of the backend unless given. `dtype`: f32, f16 or bf16. `settings`:
    keyword arguments of a script's factory. `engine`: options of TensorRT engines, see
    `EngineOptions` in irc.backends.tensorrt.options; those of an artifact hold on. `dims`: ranges
    (min, typical, max) of symbols. `random_weights`: a seed, in place of a checkpoint.
    `instruments` watch the passes; without them each pass is verified. `progress` is told what goes
    on.
    """

    mesh: str | Mapping[str, int]
    plan: PathLike
    sequence: bool
    embedding: str
    outside: str
    next_tokens: bool
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


_TEXTS = {  # options that are text, and what to give for them
    "backend": 'its name, such as "onnx"',
    "pipeline": 'the passes as text, such as "cse, dce"',
    "embedding": 'the name of a scheme, such as "auto"',
    "outside": 'one of "zero", "clamp", "row:k", "error"',
}


def backend_of(src: PathLike | Module, options: Options) -> Backend:
    """The backend, with its options of engines; an Error where an option is unknown.

    An artifact is compiled as it was, where nothing else is said.
    """
    from ..backends import get

    for name in options:
        if name not in Options.__annotations__:
            near = did_you_mean(name, Options.__annotations__)
            raise Error(f"irc.compile has no option {name}{near}")
    for name, wanted in _TEXTS.items():
        check_kind(name, options.get(name) or "", str, wanted)
    before, remembered = _before(src)
    backend = get(options.get("backend") or before or "onnx")
    return _configured(backend, remembered, options.get("engine") or {})


def _before(src: PathLike | Module) -> tuple[str, dict[str, Any]]:
    """The backend of an artifact, and the options of its engines that hold on any machine."""
    if not isinstance(src, (str, os.PathLike)) or not is_artifact(Path(src)):
        return "", {}
    manifest = read_manifest(Path(src))
    return manifest["backend"], dict(manifest["program"].get("engine") or {})


def _is_mapping(given: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(given, Mapping)


def _configured(backend: Backend, remembered: Mapping[str, Any], given: object) -> Backend:
    """The backend with options of engines, where any are given; what was remembered holds for a
    backend that builds engines."""
    configured = getattr(backend, "configured", None)
    if configured is None:
        if not given:
            return backend
        shown = ", ".join(map(str, given)) if _is_mapping(given) else given
        raise Error(
            f"{shown}: options of engines, and the backend {backend.name} builds none; "
            "give --backend tensorrt-rtx or --backend tensorrt"
        )
    engine = {**_lasting(remembered, given), **given} if _is_mapping(given) else given
    return configured(engine) if engine else backend


def _lasting(remembered: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was remembered and does not get in the way of what is given."""
    if given.get("triton") is None:
        return dict(remembered)
    # what Triton can serve is chosen anew, where the user leaves it open
    decided = ("weights", "collectives")
    return {name: value for name, value in remembered.items() if name not in decided}
