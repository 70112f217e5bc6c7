"""Starts the processes of these tests, and checks that none of them remains."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import pytest

from tests.layout import ROOT

MARK = "IRC_TEST_WORLD"  # a variable of every process of a run, with a value of its own
SOON = 120.0  # seconds after which a test fails
MPIEXEC = Path(sys.prefix, "bin", "mpiexec")
needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not MPIEXEC.is_file(),
    reason="no mpi4py or mpich: pip install '.[mpi]'",
)


@dataclass
class Outcome:
    """How a rank of tests/ranks/programs.py ended, and how long after the failure began."""

    outcome: str
    seconds: float


@dataclass
class World:
    """Processes that were started together; their output goes into files, so they never block."""

    process: subprocess.Popen[bytes]
    word: str
    out: BinaryIO
    err: BinaryIO

    def printed(self) -> bytes:
        """Standard output up to now."""
        return os.pread(self.out.fileno(), 1 << 24, 0)

    def ranks(self, count: int, seconds: float = SOON) -> dict[int, int]:
        """The process of each rank, once there are so many."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ranks = {rank: process for process, rank in left(self.word).items() if rank is not None}
            if len(ranks) == count:
                return ranks
            time.sleep(0.05)
        raise AssertionError(f"no {count} ranks: {left(self.word)}")

    def end(self, seconds: float = SOON) -> tuple[int, str, str]:
        """Exit status, standard output and error, once no process is left."""
        self.process.wait(seconds)
        assert nothing_left(self.word), left(self.word)
        err = os.pread(self.err.fileno(), 1 << 24, 0)
        return self.process.returncode, self.printed().decode(), err.decode()


def left(word: str) -> dict[int, int | None]:
    """The running processes of a run, and the rank of each that has one."""
    processes: dict[int, int | None] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={word}".encode() in variables and state not in "ZX":
            ranks = [int(v.partition(b"=")[2]) for v in variables if v.startswith(b"PMI_RANK=")]
            processes[int(folder.name)] = ranks[0] if ranks else None
    return processes


def nothing_left(word: str, seconds: float = SOON) -> bool:
    """Whether all processes of a run end within so many seconds."""
    until = time.monotonic() + seconds
    while left(word):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def started(
    command: Sequence[str | Path], stdin: bytes = b"", stdout: int | None = None
) -> Iterator[World]:
    """A run; at the end all its processes are killed.

    `stdout` is where standard output goes instead of the file.
    """
    word = uuid.uuid4().hex
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            [str(each) for each in command],
            cwd=ROOT,
            env={**os.environ, MARK: word},
            stdin=given if stdin else subprocess.DEVNULL,
            stdout=out if stdout is None else stdout,
            stderr=err,
        )
        try:
            yield World(process, word, out, err)
        finally:
            for left_over in left(word):
                with suppress(ProcessLookupError):  # it may have ended by itself meanwhile
                    os.kill(left_over, 9)
            process.kill()
            process.wait()


def program(ranks: int, name: str, folder: Path) -> list[str]:
    """The command of a program of tests/ranks/programs.py."""
    python = [sys.executable, "-m", "tests.ranks.programs", name, str(folder)]
    return [str(MPIEXEC), "-n", str(ranks), *python]


def irc(*words: str | Path) -> list[str]:
    """The command line of irc."""
    return [sys.executable, "-m", "irc", *map(str, words)]


def outcomes(folder: Path) -> dict[int, Outcome]:
    """What the ranks of a program wrote."""
    files = sorted(folder.glob("rank*.json"))
    return {int(f.stem.removeprefix("rank")): Outcome(**json.loads(f.read_text())) for f in files}
