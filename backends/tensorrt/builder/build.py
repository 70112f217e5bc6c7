"""Builds engines from ONNX files, each in a process of its own, or takes them from the cache."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import irc
from irc.artifact.atomic import whole_file
from irc.artifact.checksums import sha256
from irc.artifact.manifest import Progress, silent
from irc.backends.cuda.runtime import device_count
from irc.backends.tensorrt.builder.cache import key_of, open_cache
from irc.backends.tensorrt.builder.child import MODEL, PART, WEIGHTS
from irc.backends.tensorrt.builder.failures import Ended, failure_of
from irc.backends.tensorrt.builder.library import Library, find, shared_library
from irc.backends.tensorrt.builder.model import Model, digest_of_weights, read
from irc.backends.tensorrt.builder.report import Report
from irc.backends.tensorrt.builder.request import BuildRequest, Built
from irc.errors import Error

_NO_RANDOM_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of personality(2)
# Prefixes of the variables that the library or Python may need.
_PASSED = ("CUDA_", "HOME", "LANG", "LC_", "NVIDIA_", "PATH", "TMPDIR", "TRT_")
_KEPT = 20_000  # bytes of the output of the process in which its last line is


def build(request: BuildRequest, progress: Progress = silent) -> Built:
    """Write the engine to `request.engine`, from the cache or newly built.

    `progress` gets each stage and the fraction done. An Error says what could not be built, with
    the operation and the user's line if the library names it; then, as after ctrl-C, no file is
    left behind.
    """
    library = find(request.target.flavour)
    _check(request, library)
    model = read(request.model, (request.model.resolve().parent, request.base))
    try:
        return _build_cached(request, library, model, progress)
    except OSError as error:
        raise Error(f"cannot build {request.engine}: {error}") from error


def _build_cached(
    request: BuildRequest, library: Library, model: Model, progress: Progress
) -> Built:
    options, engine = request.options, request.engine
    if not options.caching:
        return Built(engine, _build(request, library, model, progress), cached=False)
    try:
        cache = open_cache(options.cache)
    except Error as error:
        if options.cache is not None:
            raise
        report = _build(request, library, model, progress)
        warning = f"the engine is not kept for later compilations: {error.message}"
        return Built(engine, report, cached=False, warnings=(warning,))
    key = key_of(_facts(request, library, model, progress))
    waiting = f"waiting for another process that builds {engine.name}"
    with cache.lock(key, lambda: progress(waiting, 0.0)):
        kept = cache.fetch(key, engine, progress)
        if kept is not None:
            return Built(engine, kept["report"], cached=True, hash=kept["engine"])
        built = Built(engine, _build(request, library, model, progress), cached=False)
        try:
            return replace(built, hash=cache.store(key, engine, built.report, progress))
        except OSError as error:
            warning = f"the engine could not be kept in the cache {cache.folder} ({error.strerror})"
            return replace(built, warnings=(warning,))


def _check(request: BuildRequest, library: Library) -> None:
    """Raise an Error about what the library or this machine cannot build."""
    name, options = library.traits.name, request.options
    if options.refit and (library.flavour, library.release) == ("tensorrt", (11, 3)):
        # Its release notes: Refitting Engines, docs.nvidia.com/deeplearning/tensorrt/11.3.0
        raise Error(
            f"{library} may drop the bias of a product when it refits an engine; "
            "compile without --refit, or with another version"
        )
    if device_count():
        return
    if not library.traits.cross_compiles:
        raise Error(
            f"{name} builds engines only for the GPU of this machine, which has none; "
            "compile on the machine with the GPU, or build for tensorrt-rtx here"
        )
    if options.refit or options.strip:
        option = "--refit" if options.refit else "--strip"
        raise Error(
            f"{name} needs a GPU to build an engine with {option}, and this machine has none; "
            f"compile without {option}, or on a machine with a GPU"
        )


def _facts(
    request: BuildRequest, library: Library, model: Model, progress: Progress
) -> dict[str, Any]:
    """Everything that determines the engine, for its key in the cache."""
    plugins: dict[str, str] = {}
    if model.has_plugins or request.plugins:
        from irc.backends.tensorrt.plugins import versions

        plugins = dict(versions())
    return {
        "model": model.digest,
        "weights": digest_of_weights(model, progress),
        "settings": request.settings(),
        "library": str(library),
        "gpu": "" if library.traits.cross_compiles else _gpu(),
        "plugins": plugins,
        "files": [sha256(Path(path)) for path in request.plugins],
    }


def _gpu() -> str:
    """The name and driver of the GPU that TensorRT builds for."""
    from irc.backends.cuda.runtime import call, use_device

    return f"{use_device(0)} {call('cudaDriverGetVersion')}"


def _build(request: BuildRequest, library: Library, model: Model, progress: Progress) -> Report:
    stage, chips = f"building {request.engine.name}", list(request.target.architectures)
    message = {
        **request.settings(),
        "flavour": library.flavour,
        "library": str(library),
        "architectures": chips if library.traits.cross_compiles else [],
        "plugins": request.plugins,
        "has_plugins": model.has_plugins or bool(request.plugins),
    }
    progress(stage, 0.0)
    with whole_file(request.engine) as part:
        with _working_folder(model, Path(part.name), library) as folder:
            variables = _environment(folder, has_user_code=bool(request.plugins))
            ended = _run(message, folder, variables, lambda fraction: progress(stage, fraction))
        if "report" not in ended.event:
            limited = request.options.workspace is not None
            raise failure_of(model, str(library), request.engine.name, limited, ended)
    return Report.from_json(ended.event["report"])


def _run(
    message: Mapping[str, Any],
    folder: Path,
    variables: Mapping[str, str],
    progress: Callable[[float], None],
) -> Ended:
    """Build one engine in a process in `folder`, which ends with this call in every case."""
    event: dict[str, Any] = {}
    with tempfile.TemporaryFile() as output:
        with _fixed_addresses():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "irc.backends.tensorrt.builder.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=folder,
                env=variables,
                start_new_session=True,  # ctrl-C reaches this process only
            )
        assert process.stdin is not None and process.stdout is not None
        with process:
            try:
                with suppress(BrokenPipeError):  # it has ended already; its status says why
                    process.stdin.write(json.dumps(message).encode() + b"\n")
                    process.stdin.flush()
                for line in process.stdout:
                    with suppress(ValueError):  # the last line of a process that was killed
                        event = json.loads(line)
                    if "fraction" in event:
                        progress(event.pop("fraction"))
                status = process.wait()
            finally:
                process.kill()
                with suppress(BrokenPipeError):
                    process.stdin.close()
        output.seek(max(0, output.seek(0, os.SEEK_END) - _KEPT))
        lines = output.read().decode(errors="replace").strip().splitlines()
    return Ended(event, status, lines[-1].strip() if lines else "")


@contextmanager
def _fixed_addresses() -> Generator[None]:
    """Processes started by this thread in the block get the same memory addresses each time.

    The library orders some values by their addresses, so engines would differ from run to run.
    On a system that does not allow this (some containers do not), they sometimes do.
    """
    personality = getattr(ctypes.CDLL(None), "personality", lambda flags: 0)  # of Linux
    before = personality(0xFFFFFFFF)
    personality(before | _NO_RANDOM_ADDRESSES)
    try:
        yield
    finally:
        personality(before)


@contextmanager
def _working_folder(model: Model, part: Path, library: Library) -> Generator[Path]:
    """A temporary folder with links to the model, the path of its engine, weights and library.

    The model and the engine are links so that the process has the same request, and so the same
    memory, wherever they are. The parser looks for weights below one folder only, so links to all
    weight files are there. It opens its own library by a name that the wheels do not have, so
    `libraries` has a link of that name.
    """
    with tempfile.TemporaryDirectory(prefix="irc-build-") as name:
        folder = Path(name)
        links = {MODEL: model.path, PART: part}
        links |= {f"{WEIGHTS}/{weight.location}": weight.file for weight in model.external}
        if (shared := shared_library(library.traits)) is not None:
            links[f"libraries/{library.traits.shared}"] = shared
        for link, target in links.items():
            (folder / link).parent.mkdir(parents=True, exist_ok=True)
            (folder / link).symlink_to(target.resolve())
        yield folder


def _environment(folder: Path, has_user_code: bool) -> dict[str, str]:
    """The variables of the process: all of the user's if it runs the user's files of plugins, else
    few, because they are part of the memory that must be the same each time."""
    variables = {n: x for n, x in os.environ.items() if has_user_code or n.startswith(_PASSED)}
    first = {
        "PYTHONPATH": str(Path(irc.__file__).resolve().parents[1]),
        "LD_LIBRARY_PATH": str(folder / "libraries"),
        # For the same memory each time: no allocation is handed from one thread to another, and
        # numpy has no thread beside the one in child.py.
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    }
    for name, text in first.items():
        variables[name] = os.pathsep.join(filter(None, [text, os.environ.get(name)]))
    return variables | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
