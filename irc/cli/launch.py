"""Starts a process per rank through MPI's launcher, shows what they print, and ends them all."""

from __future__ import annotations

import codecs
import json
import os
import secrets
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from ..errors import Error
from .frames import BEGIN, ERR, EXIT, OUT, FrameReader
from .launcher_errors import LauncherErrors
from .rank import COMMAND, TERMINALS, TOKEN, encoded

STARTING = 70.0  # seconds until the ranks have met: longer than their guardians wait
ENDING = 3.0  # seconds for each polite way of ending
_LONGEST = 100_000  # characters of a variable in the environment
_KEPT = 2000  # bytes of the launcher's own words


def launch(words: list[str], ranks: int, hosts: Sequence[str] = (), data: bytes = b"") -> int:
    """Run a command in `ranks` processes; its exit status.

    `hosts`: where they run, this one unless given; each host takes ranks in a row. `data` is
    standard input for the first rank.
    """
    token = secrets.token_hex(16)
    command = encoded(words)
    if len(command) > _LONGEST:
        raise Error("this command is too long to pass on; give the prompt by standard input: -")
    terminals = [kind for kind, stream in ((OUT, sys.stdout), (ERR, sys.stderr)) if stream.isatty()]
    environment = {COMMAND: command, TOKEN: token, TERMINALS: " ".join(terminals)}
    line, errors = command_line(ranks, hosts), LauncherErrors()
    with subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors.pipe,
        bufsize=0,
        env={**os.environ, **environment},
        start_new_session=True,  # so that ctrl-C comes here alone
    ) as process:
        try:
            errors.start()
            _feed(process, data)
            return _Show(process, token, hosts, errors).run()
        finally:
            _end(process)


def command_line(ranks: int, hosts: Sequence[str] = ()) -> list[str]:
    """What starts the ranks: MPI's launcher, and this Python with this irc."""
    from ..backends.mpi.launcher import is_hydra, mpiexec

    path = mpiexec()
    line = [path, "-n", str(ranks)]
    if hosts:
        if not is_hydra(path):
            raise Error(f"{path} is not MPICH's, whose options irc knows; use your own mpirun")
        each = -(-ranks // len(hosts))
        line += ["-launcher", "ssh", "-hosts", ",".join(hosts), "-ppn", str(each)]
    here = Path(__file__).resolve().parents[2] == Path.cwd().resolve()
    # -P as for the program irc: a folder called irc where the user stands is not meant
    return [*line, sys.executable, *([] if here else ["-P"]), "-m", "irc"]


def _feed(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Send what the first rank reads; the pipe stays open as long as this process lives."""

    def write(pipe: int) -> None:
        left = memoryview(b"%d\n" % len(data) + data)
        with suppress(OSError):  # the ranks have ended
            while left:
                left = left[os.write(pipe, left) :]

    assert process.stdin is not None
    threading.Thread(target=write, args=(process.stdin.fileno(),), daemon=True).start()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, politely first; its helpers kill all ranks when it is gone."""
    try:
        with suppress(subprocess.TimeoutExpired):
            if process.poll() is None:
                process.terminate()
                process.wait(ENDING)
    finally:
        process.kill()
        process.wait()


class Deaths:
    """Which rank of this host ended first: the others may be killed before they say it."""

    def __init__(self) -> None:
        self.first: tuple[int, int] | None = None  # rank, process
        self._selector = selectors.DefaultSelector()

    def watch(self, homes: list[tuple[str, list[int]]]) -> None:
        """Per rank the kernel, and the processes that are it there."""
        from ..backends.mpi.process import own_home

        kernel = own_home().kernel
        for rank, (place, processes) in enumerate(homes):
            if kernel and place == kernel and hasattr(os, "pidfd_open"):
                for process in processes:
                    with suppress(OSError):  # it has ended already
                        file = os.pidfd_open(process)
                        self._selector.register(file, selectors.EVENT_READ, (rank, process))

    def wait(self, pipe: int, seconds: float | None) -> bool:
        """Whether there is something to read from a pipe, or no more, within so many seconds."""
        if pipe not in self._selector.get_map():
            self._selector.register(pipe, selectors.EVENT_READ)
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            events = self._selector.select(left)  # in the order in which they happened
            for key, _ in events:
                if key.data is not None:
                    self.first = self.first or key.data
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            if any(key.data is None for key, _ in events):
                return True
            if not events and until is not None:
                return False

    def close(self) -> None:
        """Give up what is watched."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()


class _Show:
    """Prints what the ranks say until they end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        token: str,
        hosts: Sequence[str],
        errors: LauncherErrors,
    ) -> None:
        assert process.stdout is not None
        self._hosts, self._errors = hosts, errors
        self._process, self._pipe = process, process.stdout.fileno()
        self._reader = FrameReader(token)
        utf_8 = codecs.getincrementaldecoder("utf-8")
        self._decoders = {kind: utf_8("replace") for kind in (OUT, ERR)}
        self._others = b""  # what the launcher itself has said
        self._met = False
        self._deaths = Deaths()
        self._status: int | None = None

    def run(self) -> int:
        """The exit status of the command."""
        try:
            return self._run()
        finally:
            self._deaths.close()

    def _run(self) -> int:
        until = time.monotonic() + STARTING
        while self._read(until):
            if self._status is not None:
                until = min(until, time.monotonic() + ENDING)
            elif self._met:
                until = inf
        if self._status is not None:
            return self._status
        if not self._met and time.monotonic() >= until:
            raise self._error(f"the ranks have not met within {STARTING:g} s")
        return self._ended()

    def _read(self, until: float) -> bool:
        """Show what comes; false once nothing more will, or it takes too long."""
        left = None if until == inf else max(0.0, until - time.monotonic())
        if not self._deaths.wait(self._pipe, left):
            return False
        data = os.read(self._pipe, 1 << 16)
        for kind, text in self._reader.feed(data):
            self._take(kind, text)
        return bool(data)

    def _take(self, kind: str, data: bytes) -> None:
        if kind in self._decoders:
            stream = sys.stdout if kind == OUT else sys.stderr
            stream.write(self._decoders[kind].decode(data))
            stream.flush()
        elif kind == BEGIN:
            self._met = True
            self._deaths.watch(json.loads(data))
        elif kind == EXIT:
            self._status = int(data)
        else:
            self._others = (self._others + data)[-_KEPT:]

    def _ended(self) -> int:
        """The ranks ended, and none of them said how."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)
        from ..backends.mpi.guardian import SAID

        code = self._process.poll()
        if code == 0:
            return 0
        if code == SAID:
            return 1
        died = self._deaths.first
        if died is not None:
            raise self._error(f"rank {died[0]} (process {died[1]}) died")
        if self._hosts and not self._met:
            what = f"no ranks could be started on {', '.join(self._hosts)}"
            why = self._errors.about(self._hosts)
            raise self._error(f"{what}: {why}" if why else what)
        raise self._error(f"the ranks ended, and mpiexec with the exit status {code}")

    def _error(self, what: str) -> Error:
        words = " ".join(self._others.decode(errors="replace").replace("=", "").split())
        return Error(f"{what}; mpiexec says: {words}" if words else what)
