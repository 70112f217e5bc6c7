"""Starts a process per rank on this host, passes their messages on, and ends them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import Error
from .place import PIPE

if TYPE_CHECKING:
    from ..backends.processes.communicator import HubCommunicator
    from ..backends.processes.hub import Hub

    Pipe: TypeAlias = Connection[Any, Any]

STARTING = 60.0  # seconds until the ranks have met
ENDING = 6.0  # seconds that the other ranks have to end once one has failed
_POLITE = 3.0
_LAST = 0.5  # seconds that they have once rank 0 has told the user
_TURN = 0.05


def spawn(words: list[str], ranks: int) -> int:
    """Run a command in `ranks` processes of this host; its exit status is that of rank 0.

    Rank 0 has the terminal, and tells of errors; where it dies, this process does.
    """
    from ..backends.processes.hub import Hub, pair

    hub = Hub(ranks)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        pipes: list[Pipe] = []
        for rank in range(ranks):
            ours, theirs = pair()
            processes.append(_started(words, rank, ranks, theirs))
            theirs.close()
            pipes.append(ours)
        return _Watch(hub, processes, pipes).run()
    finally:
        _end(processes, 0.0 if hub.failure else _POLITE)
        hub.close(0.0)


def joined(rank: int, ranks: int, say: Callable[[str], None]) -> HubCommunicator:
    """The communicator of a process that `spawn` started."""
    from ..backends.processes.communicator import HubCommunicator, hello

    connection = Connection(int(os.environ.pop(PIPE)))
    hello(connection, rank, ranks)
    return HubCommunicator(connection, rank, ranks, launched=True, say=say)


def _started(words: list[str], rank: int, ranks: int, pipe: Pipe) -> subprocess.Popen[bytes]:
    environment = {PIPE: str(pipe.fileno()), "IRC_RANK": str(rank), "IRC_RANKS": str(ranks)}
    quiet = rank > 0 and os.environ.get("IRC_DEBUG", "") in ("", "0")
    here = Path(__file__).resolve().parents[2] == Path.cwd().resolve()
    # -P as for the program irc: a folder called irc where the user stands is not meant
    return subprocess.Popen(
        [sys.executable, *([] if here else ["-P"]), "-m", "irc", *words],
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if quiet else None,
        env={**os.environ, **environment},
        pass_fds=[pipe.fileno()],
        start_new_session=True,  # so that ctrl-C comes here alone
    )


class _Watch:
    def __init__(
        self, hub: Hub, processes: list[subprocess.Popen[bytes]], pipes: list[Pipe]
    ) -> None:
        self._hub, self._processes = hub, processes
        self._coming = dict(enumerate(pipes))

    def run(self) -> int:
        """The exit status of rank 0, once all have ended; an Error where it cannot say why."""
        until = time.monotonic() + STARTING
        self._hub.start()
        while self._coming and not self._hub.failure:
            self._admit()
            if time.monotonic() > until:
                missing = " and ".join(f"rank {rank}" for rank in self._coming)
                self._hub.fail(f"{missing} did not start within {STARTING:g} s")
        while not self._hub.failure and self._running():
            self._look()
            time.sleep(_TURN)
        until = time.monotonic() + ENDING
        while self._running() and time.monotonic() < until:
            time.sleep(_TURN)
            if self._processes[0].poll() is not None:
                until = min(until, time.monotonic() + _LAST)
        status = self._processes[0].poll()
        if status is not None and status >= 0:
            return status
        if self._has_told():
            return 1
        raise Error(self._hub.failure or self._death(0))

    def _has_told(self) -> bool:
        """Whether rank 0, which was killed or did not end in time, has told the user why."""
        self._processes[0].kill()
        self._processes[0].wait()
        return bool(self._hub.failure) and self._hub.has_left(0, _POLITE)

    def _admit(self) -> None:
        """Let the ranks in that have said who they are."""
        from multiprocessing.connection import wait

        from ..backends.processes.communicator import hello_of

        for pipe in wait(list(self._coming.values()), _TURN):
            rank = next(r for r, each in self._coming.items() if each is pipe)
            try:
                _, _, home = hello_of(self._coming[rank].recv_bytes())
            except (EOFError, OSError):
                with suppress(subprocess.TimeoutExpired):
                    self._processes[rank].wait(_POLITE)
                del self._coming[rank]
                self._hub.fail(self._death(rank), rank)
                continue
            self._hub.add(rank, self._coming.pop(rank), home)

    def _running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def _look(self) -> None:
        """A rank that was killed."""
        for rank, process in enumerate(self._processes):
            if (process.poll() or 0) < 0:
                self._hub.fail(self._death(rank), rank)

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        status = process.poll()
        who = f"rank {rank} (process {process.pid})"
        if status is None:
            return f"{who} does not answer"
        if status < 0:
            name = signal.Signals(-status).name
            return f"{who} died: it was ended by the signal {name}"
        return f"{who} ended with the status {status} before it had met the others"


def _end(processes: list[subprocess.Popen[bytes]], patience: float) -> None:
    """End what still runs, politely first."""
    living = [process for process in processes if process.poll() is None]
    for process in living:
        process.terminate()
    until = time.monotonic() + patience
    for process in living:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        process.kill()
        process.wait()
