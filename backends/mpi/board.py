"""What the two threads of a rank share: what the rank is doing, and why the run has failed."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from irc.backends.communicator import PeerError
from irc.backends.mpi.process import Home, Life
from irc.backends.mpi.sign import ENDED, PAUSED, WORKS, Failure, Sign


class Doing(Protocol):
    """A call that the rank is in: text for people, and the other ranks that take part."""

    @property
    def text(self) -> str:
        """What is done, and where."""
        ...

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks that have to come."""
        ...


class Board:
    """The working thread writes what it does, the pulse thread reads it and writes failures."""

    def __init__(self, rank: int, home: Home) -> None:
        self.rank, self.home = rank, home
        self.doing: Doing | None = None
        self.state = WORKS  # within `doing`: WAITS or MOVES
        self.awaits: tuple[int, ...] | None = None  # None: all others that take part
        self.progress = 0
        self.failure: Failure | None = None
        self.leaving: int | None = None  # the exit status, once the process is to end
        self.said = False
        self.changed = threading.Event()  # wakes the pulse thread
        self._lock, self._life = threading.Lock(), Life()

    def fail(self, failure: Failure) -> None:
        """Make a failure known, unless an earlier one is."""
        with self._lock:
            self.failure = self.failure or failure
        self.changed.set()

    def check(self) -> None:
        """Raise the failure where there is one."""
        if self.failure is not None:
            raise PeerError(self.failure.text)

    def claim(self, ranks: int) -> bool:
        """Whether the caller is the one that tells the user of the failure: true once, on one rank.

        That is the first of `ranks` ranks that can speak.
        """
        with self._lock:
            failure, told = self.failure, self.said
            if failure is None or told or self.rank != speaker(failure, ranks):
                return False
            self.said = True
            return True

    @contextmanager
    def paused(self) -> Generator[None]:
        """While the user is waited for, no other rank takes this one for stuck."""
        self.state = PAUSED
        try:
            yield
        finally:
            self.state = WORKS

    def sign(self) -> Sign:
        """What the other ranks are told now."""
        doing, state, awaits = self.doing, self.state, self.awaits
        if self.leaving is not None:
            state = ENDED
        elif doing is None and state != PAUSED:
            state = WORKS
        return Sign(
            self.rank,
            self.home,
            state,
            self._life() if state == WORKS else 0,
            self.progress,
            doing.text if doing is not None else "",
            (doing.others if awaits is None else awaits) if doing is not None else (),
            self.failure,
            self.said,
        )


def speaker(failure: Failure, ranks: int) -> int:
    """The rank that tells the user of a failure: the first that can."""
    able = (rank for rank in range(ranks) if rank not in failure.silent)
    return next(able, 0)
