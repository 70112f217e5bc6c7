"""Builds engines from ONNX files, each in a process of its own, or takes them from the cache."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from irc.artifact import Progress, silent
from irc.backends.tensorrt.builder import process
from irc.backends.tensorrt.builder.cache import Cache, NoCache, key_of, open_cache
from irc.backends.tensorrt.builder.failures import Hearing
from irc.backends.tensorrt.builder.library import Library, find, has_gpu
from irc.backends.tensorrt.builder.model import Model, digest_of_weights, read
from irc.backends.tensorrt.builder.report import Report
from irc.backends.tensorrt.builder.request import BuildRequest, Built, Profile
from irc.errors import Error
from irc.locks import locked

_REFIT_DROPS_BIAS = ("tensorrt", (11, 3))

__all__ = ["BuildRequest", "Built", "Profile", "build"]


def build(request: BuildRequest, tell: Progress | None = None) -> Built:
    """Have an engine at `request.engine`, from the cache or built now.

    `tell` hears what is being done and the fraction done. An Error says what could not be built,
    with the operation and the user's line as far as the library tells; then, as after ctrl-C, no
    engine and no half of one is left at its place.
    """
    began = time.perf_counter()
    tell = tell if tell is not None else silent
    request.check()
    library = find(request.target.flavour)
    _check(request, library)
    model = read(request.model)
    cache, warning = open_cache(request.cache) if request.caching else (NoCache(), "")
    # Without a cache nothing needs the hash of all weights.
    keeps = not isinstance(cache, NoCache)
    key = key_of(_facts(request, library, model, tell)) if keeps else ""
    waiting = _waiting(request.engine, tell)
    try:
        with locked(_beside(request.engine, "lock"), waiting), cache.lock(key, waiting):
            built = _have(request, library, model, cache, key, tell)
    except OSError as error:
        raise Error(f"cannot write {request.engine}: {error.strerror or error}") from error
    warnings = (*filter(None, [warning]), *built.report.warnings)
    return replace(built, seconds=time.perf_counter() - began, warnings=warnings)


def _have(
    request: BuildRequest, library: Library, model: Model, cache: Cache, key: str, tell: Progress
) -> Built:
    kept = cache.take(key, request.engine, tell)
    if kept is not None:
        return Built(request.engine, kept.report, cached=True, hash=kept.hash)
    report, peak = _build(request, library, model, cache, tell)
    found = ""
    try:
        found = cache.keep(key, request.engine, report, tell)
    except OSError as error:
        problem = f"the engine was built and could not be kept in the cache {cache.folder}"
        report = replace(report, warnings=(*report.warnings, f"{problem} ({error.strerror})"))
    return Built(request.engine, report, cached=False, peak_bytes=peak, hash=found)


def _build(
    request: BuildRequest, library: Library, model: Model, cache: Cache, tell: Progress
) -> tuple[Report, int]:
    part = _beside(request.engine, f"{uuid.uuid4().hex}.part")
    name = request.engine.name
    tell(f"building {name}", 0.0)
    hearing = Hearing(model, str(library), name, tell, request.workspace is not None)
    try:
        user_code = bool(request.plugins)
        with process.prepared(model, request.folders, part, library.traits, user_code) as place:
            asked = _asked(request, library, model, cache)
            ended = process.converse(asked, place, hearing.hear)
        problem = hearing.problem(ended)
        if problem is not None:
            raise problem
        assert hearing.done is not None
        part.replace(request.engine)
    finally:
        part.unlink(missing_ok=True)
    return Report.from_json(hearing.done["report"]), hearing.done["peak"]


def _asked(request: BuildRequest, library: Library, model: Model, cache: Cache) -> dict[str, Any]:
    """The request as the process reads it."""
    timing = ""
    if library.traits.timing_cache and not isinstance(cache, NoCache):
        timing = str(cache.folder / f"timing-{request.target.flavour}-{library.version}.cache")
    return {
        **request.options(),
        "flavour": request.target.flavour,
        "architectures": list(request.target.architectures),
        "name": model.path.name,
        "inputs": dict(model.inputs),
        "outputs": dict(model.outputs),
        "plugins": [str(Path(each).resolve()) for each in request.plugins],
        "has_plugins": model.has_plugins,
        "timing_cache": timing,
    }


def _check(request: BuildRequest, library: Library) -> None:
    """What has to be so before anything is read or started."""
    traits = library.traits
    target = request.target
    if library.release != target.version:
        raise Error(
            f"{request.model.name} was lowered for {target}, and {library} is installed; "
            "compile again for that version"
        )
    if traits.capabilities and not target.architectures:
        raise Error(f"{target} names no GPU architecture; write {target}/sm_89, for one")
    if request.refit and (target.flavour, library.release) == _REFIT_DROPS_BIAS:
        # Its release notes: Refitting Engines, docs.nvidia.com/deeplearning/tensorrt/11.3.0
        raise Error(
            f"{library} may drop the bias of a product when it refits an engine; "
            "build without refit, or with another version"
        )
    if not request.engine.parent.is_dir():
        raise Error(f"the folder {request.engine.parent} of the engine does not exist; make it")
    if has_gpu():
        return
    if not traits.capabilities:
        raise Error(
            f"{traits.name} builds engines on the GPU that they are for, and this machine has "
            "none; compile on that machine, or build for tensorrt-rtx here"
        )
    if request.refit or request.strip:
        option = "refit" if request.refit else "strip"
        raise Error(
            f"{traits.name} needs a GPU to build an engine for {option}, and this machine has "
            f"none; build without {option}, or with the weights outside"
        )


def _facts(
    request: BuildRequest, library: Library, model: Model, tell: Progress
) -> Mapping[str, Any]:
    """What makes an engine the one it is, for its key in the cache."""
    plugins: dict[str, str] = {}
    if model.has_plugins or request.plugins:
        from irc.backends.tensorrt.plugins import versions

        plugins = dict(versions())
    return {
        "model": model.digest,
        "weights": digest_of_weights(
            model, request.folders, f"reading the weights of {model.path.name}", tell
        ),
        "options": request.options(),
        "library": str(library),
        "gpu": "" if library.traits.capabilities else _gpu(),
        "plugins": plugins,
        "files": [_digest(Path(each)) for each in request.plugins],
    }


def _gpu() -> str:
    """The GPU that an engine of full TensorRT is for, by name and driver."""
    from irc.backends.cuda.runtime import call, use_device

    return f"{use_device(0)} {call('cudaDriverGetVersion')}"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise Error(f"cannot read the plugins of {path}: {error.strerror}") from None


def _beside(engine: Path, ending: str) -> Path:
    return engine.with_name(f".{engine.name}.{ending}")


def _waiting(engine: Path, tell: Progress) -> Any:
    return lambda: tell(f"waiting for another process that builds {engine.name}", 0.0)
