"""Starts the builder's process, receives its events, and ends it in every case."""

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
from typing import Any

import irc
from irc.backends.tensorrt.builder.library import Traits, shared_library
from irc.backends.tensorrt.builder.model import Model, locate

TIMEOUT = 4.0  # seconds in which the process must end after its standard input closed
MODEL, PART, WEIGHTS = "model.onnx", "engine.part", "weights"  # in the folder it works in
_NO_RANDOM_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of personality(2)
# Prefixes of the variables that the library or Python may need.
_PASSED = ("CUDA_", "HOME", "LANG", "LC_", "NVIDIA_", "PATH", "TMPDIR", "TRT_")
_KEPT = 20_000  # bytes of its output that are kept


@dataclass(frozen=True)
class Ended:
    """How the process ended: its status (negative: the signal), and what it printed."""

    status: int
    output: str

    @property
    def last_line(self) -> str:
        """The last line that it printed, or ""."""
        return next(reversed(self.output.strip().splitlines()), "").strip()


def run(
    request: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str],
    receive: Callable[[dict[str, Any]], None],
) -> Ended:
    """Build one engine in a process in `folder`; `receive` is called with each event."""
    command = [sys.executable, "-P", "-m", "irc.backends.tensorrt.builder.child"]
    with tempfile.TemporaryFile() as output:
        with _fixed_addresses():
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=folder,
                env=environment,
                start_new_session=True,  # ctrl-C reaches this process only
            )
        with process:
            try:
                assert process.stdin is not None and process.stdout is not None
                with suppress(BrokenPipeError):  # it has ended already; its status says why
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    process.stdin.flush()
                for line in process.stdout:
                    with suppress(ValueError):  # the last line of a process that was killed
                        receive(json.loads(line))
                status = process.wait()
            finally:
                _end(process)
        output.seek(max(0, output.seek(0, os.SEEK_END) - _KEPT))
        return Ended(status, output.read().decode(errors="replace"))


@contextmanager
def _fixed_addresses() -> Generator[None]:
    """Processes started by this thread in the block get the same memory addresses each time.

    The library orders some values by their addresses, so engines would differ from run to run.
    On a system that does not allow this (some containers do not), they sometimes do.
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
    """Close the standard input of the process, which ends it; then kill it."""
    try:
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            assert process.stdin is not None
            process.stdin.close()
            process.wait(TIMEOUT)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def working_folder(
    model: Model, folders: tuple[Path, ...], part: Path, traits: Traits
) -> Generator[Path]:
    """A temporary folder with links to the model, the path of its engine, weights and library.

    The model and the engine are links so that the process has the same request, and so the same
    memory, wherever they are. The parser looks for weights below one folder only, so links to the
    weight files of all `folders` are there. It opens its own library by a name that the wheels do
    not have, so `libraries` has a link of that name.
    """
    with tempfile.TemporaryDirectory(prefix="irc-build-") as name:
        folder = Path(name)
        (folder / "libraries").mkdir()
        (folder / MODEL).symlink_to(model.path.resolve())
        (folder / PART).symlink_to(part.resolve())
        for external in model.external:
            link = folder / WEIGHTS / external.location
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(locate(external, folders).resolve())
        if (shared := shared_library(traits)) is not None:
            (folder / "libraries" / traits.shared).symlink_to(shared)
        yield folder


def environment(folder: Path, has_user_code: bool) -> dict[str, str]:
    """The variables of the process: all of the user's if it runs the user's files of plugins, else
    few, because they are part of the memory that must be the same each time."""
    passed = os.environ.items()
    known = {name: x for name, x in passed if has_user_code or name.startswith(_PASSED)}
    package = str(Path(irc.__file__).resolve().parents[1])
    return known | {
        "PYTHONPATH": _prepend(package, "PYTHONPATH"),
        "PYTHONHASHSEED": "0",
        "LD_LIBRARY_PATH": _prepend(str(folder / "libraries"), "LD_LIBRARY_PATH"),
        # For the same memory each time: no allocation is handed from one thread to another, and
        # numpy has no thread beside the one in child.py.
        "GLIBC_TUNABLES": _prepend("glibc.malloc.tcache_count=0", "GLIBC_TUNABLES"),
        "OPENBLAS_NUM_THREADS": "1",
    }


def _prepend(first: str, variable: str) -> str:
    """The list of paths (or settings) in a variable with one more in front."""
    rest = os.environ.get(variable)
    return f"{first}{os.pathsep}{rest}" if rest else first
