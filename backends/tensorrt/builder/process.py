"""Starts the builder's process, hears what it says, and ends it in every case."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import irc
from irc.backends.tensorrt.builder.library import Traits, shared_library
from irc.backends.tensorrt.builder.model import Model, locate

ENDING = 4.0  # seconds that the process has to end when it is asked to
MODEL, PART, WEIGHTS = "model.onnx", "engine.part", "weights"  # in the folder it works in
_NO_RANDOM_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of personality(2)
# How the names of variables begin that the library or Python may need.
_PASSED = ("CUDA_", "HOME", "LANG", "LC_", "NVIDIA_", "PATH", "TMPDIR", "TRT_")
_WORDS = 20_000  # bytes of what it printed that are kept


@dataclass(frozen=True)
class Place:
    """The folder that the process works in, and what is added to its environment."""

    folder: Path
    environment: Mapping[str, str]
    whole_environment: bool = False


@dataclass(frozen=True)
class Ended:
    """How the process ended: its status (negative: the signal), and what it printed."""

    status: int
    words: str


def converse(
    request: Mapping[str, Any],
    place: Place,
    hear: Callable[[dict[str, Any]], None],
) -> Ended:
    """Have one engine built; `hear` is called with each event, in this thread."""
    command = [sys.executable, "-P", "-m", "irc.backends.tensorrt.builder.child"]
    with tempfile.TemporaryFile() as words, _start(command, words, place) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # it has ended already; its status says why
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            for line in process.stdout:
                with suppress(ValueError):  # the last line of a process that was killed
                    hear(json.loads(line))
            status = process.wait()
        finally:
            _end(process)
        words.seek(max(0, words.seek(0, os.SEEK_END) - _WORDS))
        return Ended(status, words.read().decode(errors="replace"))


def _start(command: list[str], words: IO[bytes], place: Place) -> subprocess.Popen[bytes]:
    with _fixed_addresses():
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            cwd=place.folder,
            env=_environment(place),
            start_new_session=True,  # so that ctrl-C comes here alone
        )


def _environment(place: Place) -> dict[str, str]:
    """The variables of the process: where the user's own file of plugins runs, all of the user's,
    else few, because they lie in the memory that has to look the same each time."""
    known = (
        dict(os.environ)
        if place.whole_environment
        else {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
    )
    return {**known, **place.environment}


@contextmanager
def _fixed_addresses() -> Generator[None]:
    """Processes started by this thread in the block have their memory at the same addresses.

    The library orders some values by their addresses, so that engines would differ from run to
    run. Where the system does not allow it (some containers do not), they now and then do.
    """
    if sys.platform != "linux":
        yield
        return
    personality = ctypes.CDLL(None).personality
    before = personality(0xFFFFFFFF)
    personality(before | _NO_RANDOM_ADDRESSES)
    try:
        yield
    finally:
        personality(before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end by closing its standard input; then kill it."""
    try:
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            assert process.stdin is not None
            process.stdin.close()
            process.wait(ENDING)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def prepared(
    model: Model, folders: tuple[Path, ...], part: Path, traits: Traits, user_code: bool = False
) -> Generator[Place]:
    """The folder that the process works in, for as long as the block runs.

    `user_code`: whether the process loads files of the user's.

    `model` and `part` are links, so that what the process is told is the same wherever a model
    lies: the library orders some things by their addresses, and its memory has to look the same
    for its engines to be the same.

    The parser looks for weights below one folder only, so links to the files of all `folders` are
    put into one. Its own library it opens by a name that the wheels do not have: a link gives it
    that, in a folder that only this process searches.
    """
    with tempfile.TemporaryDirectory(prefix="irc-build-") as name:
        folder = Path(name)
        weights, libraries = folder / WEIGHTS, folder / "libraries"
        weights.mkdir()
        libraries.mkdir()
        (folder / MODEL).symlink_to(model.path.resolve())
        (folder / PART).symlink_to(part.resolve())
        for external in model.external:
            link = weights / external.location
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(locate(external, folders).resolve())
        shared = shared_library(traits)
        if shared is not None:
            (libraries / traits.shared).symlink_to(shared)
        here = str(Path(irc.__file__).resolve().parents[1])
        environment = {
            "PYTHONPATH": _before(here, "PYTHONPATH"),
            "PYTHONHASHSEED": "0",
            "LD_LIBRARY_PATH": _before(str(libraries), "LD_LIBRARY_PATH"),
            # The same memory each time: none is handed from one thread to another, and no thread
            # of numpy's runs beside the one in child.py.
            "GLIBC_TUNABLES": _before("glibc.malloc.tcache_count=0", "GLIBC_TUNABLES"),
            "OPENBLAS_NUM_THREADS": "1",
        }
        yield Place(folder, environment, user_code)


def _before(first: str, variable: str) -> str:
    """A search path with one more folder in front."""
    rest = os.environ.get(variable)
    return f"{first}{os.pathsep}{rest}" if rest else first
