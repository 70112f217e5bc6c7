"""Builds engines from ONNX files, each in a process of its own, or takes them from the cache."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

from irc.artifact.manifest import Progress, silent
from irc.backends.tensorrt.builder import process
from irc.backends.tensorrt.builder.cache import Cache, key_of, open_cache
from irc.backends.tensorrt.builder.failures import Events
from irc.backends.tensorrt.builder.library import Library, find, has_gpu
from irc.backends.tensorrt.builder.model import Model, digest_of_weights, read
from irc.backends.tensorrt.builder.report import Report
from irc.backends.tensorrt.builder.request import BuildRequest, Built
from irc.errors import Error
from irc.files import sharing_problem

_REFIT_DROPS_BIAS = ("tensorrt", (11, 3))


def build(request: BuildRequest, progress: Progress = silent) -> Built:
    """Write the engine to `request.engine`, from the cache or newly built.

    `progress` gets each stage and the fraction done. An Error says what could not be built, with
    the operation and the user's line if the library names it; then, as after ctrl-C, no file is
    left behind.
    """
    library = find(request.target.flavour)
    _check(request, library)
    model = read(request.model)
    cache, warning = open_cache(request.options.cache) if request.options.caching else (None, "")
    try:
        if cache is None:
            report = _build(request, library, model, None, progress)
            return Built(request.engine, report, cached=False, warnings=(warning,) * bool(warning))
        return _build_cached(request, library, model, cache, progress)
    except OSError as error:
        raise Error(f"cannot write {request.engine}: {error.strerror or error}") from error


def _build_cached(
    request: BuildRequest, library: Library, model: Model, cache: Cache, progress: Progress
) -> Built:
    engine, key = request.engine, key_of(_facts(request, library, model, progress))
    waiting = f"waiting for another process that builds {engine.name}"
    with cache.lock(key, lambda: progress(waiting, 0.0)):
        found = cache.fetch(key, engine, progress)
        if found is not None:
            return Built(engine, found[0], cached=True, hash=found[1])
        report = _build(request, library, model, cache, progress)
        try:
            hash = cache.store(key, engine, report, progress)
        except OSError as error:
            warning = f"the engine could not be kept in the cache {cache.folder} ({error.strerror})"
            return Built(engine, report, cached=False, warnings=(warning,))
        return Built(engine, report, cached=False, hash=hash)


def _build(
    request: BuildRequest, library: Library, model: Model, cache: Cache | None, progress: Progress
) -> Report:
    engine = request.engine
    part = engine.with_name(f".{engine.name}.{uuid.uuid4().hex}.part")
    progress(f"building {engine.name}", 0.0)
    events = Events(model, str(library), engine.name, progress, bool(request.options.workspace))
    try:
        with process.working_folder(model, request.folders, part, library.traits) as folder:
            environment = process.environment(folder, has_user_code=bool(request.plugins))
            message = _message(request, library, model, cache)
            ended = process.run(message, folder, environment, events.add)
        problem = events.problem(ended)
        if problem is not None:
            raise problem
        assert events.done is not None
        part.replace(engine)
    finally:
        part.unlink(missing_ok=True)
    return Report.from_json(events.done["report"])


def _message(
    request: BuildRequest, library: Library, model: Model, cache: Cache | None
) -> dict[str, Any]:
    """The request as the building process reads it."""
    timing = ""
    if library.traits.timing_cache and cache is not None:
        timing = str(cache.folder / f"timing-{request.target.flavour}-{library.version}.cache")
        timing = "" if sharing_problem(timing) else timing
    return {
        **request.settings(),
        "flavour": request.target.flavour,
        "architectures": list(request.target.architectures),
        "plugins": request.plugins,
        "has_plugins": model.has_plugins or bool(request.plugins),
        "timing_cache": timing,
    }


def _check(request: BuildRequest, library: Library) -> None:
    """Raise an Error about what the library or this machine cannot build."""
    traits, options = library.traits, request.options
    if options.refit and (request.target.flavour, library.release) == _REFIT_DROPS_BIAS:
        # Its release notes: Refitting Engines, docs.nvidia.com/deeplearning/tensorrt/11.3.0
        raise Error(
            f"{library} may drop the bias of a product when it refits an engine; "
            "compile without --refit, or with another version"
        )
    if has_gpu():
        return
    if not traits.cross_compiles:
        raise Error(
            f"{traits.name} builds engines only for the GPU of this machine, which has none; "
            "compile on the machine with the GPU, or build for tensorrt-rtx here"
        )
    if options.refit or options.strip:
        option = "--refit" if options.refit else "--strip"
        raise Error(
            f"{traits.name} needs a GPU to build an engine with {option}, and this machine has "
            f"none; compile without {option}, or on a machine with a GPU"
        )


def _facts(
    request: BuildRequest, library: Library, model: Model, progress: Progress
) -> dict[str, Any]:
    """Everything that determines the engine, for its key in the cache."""
    plugins: dict[str, str] = {}
    if model.has_plugins or request.plugins:
        from irc.backends.tensorrt.plugins import versions

        plugins = dict(versions())
    stage = f"reading the weights of {model.path.name}"
    return {
        "model": model.digest,
        "weights": digest_of_weights(model, request.folders, stage, progress),
        "settings": request.settings(),
        "library": str(library),
        "gpu": "" if library.traits.cross_compiles else _gpu(),
        "plugins": plugins,
        "files": [_digest(Path(each)) for each in request.plugins],
    }


def _gpu() -> str:
    """The name and driver of the GPU that TensorRT builds for."""
    from irc.backends.cuda.runtime import call, use_device

    return f"{use_device(0)} {call('cudaDriverGetVersion')}"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise Error(f"cannot read the plugins of {path}: {error.strerror}") from None
