"""Moves bytes between ranks. Nothing blocks: every wait is polled, and a failure ends it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from irc.backends.communicator import PeerError
from irc.backends.mpi.board import Board
from irc.backends.mpi.pulse import line
from irc.backends.mpi.sign import Failure
from irc.backends.mpi.start import Started

Array: TypeAlias = np.ndarray[Any, Any]
Pairs: TypeAlias = Sequence[tuple[int, Array]]

# Bytes per message: signs of life must get through between two, on a network of 10 MB/s too.
CHUNK = 8 << 20
_SPIN = 2e-3  # seconds of polling without sleep
_NAP, _SHORT = 50e-6, 50e-3  # how long to sleep between polls, for how long
_SLEEP = 500e-6
_TELL = 3.0  # seconds in which a network that broke shows in the signs of life, too


class Wire:
    """Messages to and from the other ranks, and the waiting for them.

    Whoever waits lets others run: there may be more ranks than cores, and other programs.
    """

    def __init__(self, started: Started, board: Board) -> None:
        self.comm, self._mpi, self._board = started.comm, started.mpi, board
        self._testall: Callable[[list[Any]], bool] = self._mpi.Request.Testall

    def post(self, to: int, data: Array | bytes, tag: int) -> list[Any]:
        """Begin to send flat bytes, which must stay until the requests are done."""
        if len(data) <= CHUNK:
            return [self.comm.Isend([data, len(data), self._mpi.BYTE], to, tag)]
        return [
            self.comm.Isend([data[start : start + CHUNK], self._mpi.BYTE], to, tag)
            for start in range(0, len(data), CHUNK)
        ]

    def take(self, source: int, memory: Array | bytearray, tag: int) -> Any:
        """Begin to receive one message."""
        return self.comm.Irecv([memory, len(memory), self._mpi.BYTE], source, tag)

    def post_all(self, outgoing: Pairs, tag: int) -> list[Any]:
        """Begin to send arrays, which must stay until the requests are done."""
        pairs = [(to, flat(array)) for to, array in outgoing if array.size]
        return [one for to, data in pairs for one in self.post(to, data, tag)]

    def gather(self, incoming: Pairs, sent: list[Any], tag: int) -> None:
        """Receive arrays of known sizes, and wait until what was sent meanwhile has gone."""
        pairs = [(rank, flat(array)) for rank, array in incoming if array.size]
        largest = max((len(memory) for _, memory in pairs), default=0)
        for start in range(0, largest - CHUNK, CHUNK):
            self.wait(self._take_part(pairs, start, tag), [rank for rank, _ in pairs])
            self._board.progress += 1
        last = max(0, (largest - 1) // CHUNK * CHUNK)
        self.wait(self._take_part(pairs, last, tag) + sent, ())

    def _take_part(self, pairs: Pairs, start: int, tag: int) -> list[Any]:
        parts = [(rank, memory[start : start + CHUNK]) for rank, memory in pairs]
        return [self.take(rank, part, tag) for rank, part in parts if len(part)]

    def wait(self, requests: list[Any], ranks: Sequence[int]) -> None:
        """Poll until all requests are done; a PeerError where the run has failed meanwhile.

        `ranks`: whose messages the requests are, one each; none where that does not matter.
        """
        testall = self._testall
        if testall(requests):
            return
        self._until(lambda: testall(requests), lambda: _pending(requests, ranks))

    def message(self, source: int, tag: int) -> bytes:
        """Wait for a message of any length."""
        status = self._mpi.Status()
        found: list[Any] = []

        def came() -> bool:
            message = self.comm.Improbe(source, tag, status)
            if message is not None:
                found.append(message)
            return message is not None

        self._until(came, lambda: (source,))
        memory = bytearray(status.Get_count(self._mpi.BYTE))
        self.wait([found[0].Irecv([memory, len(memory), self._mpi.BYTE])], ())
        return bytes(memory)

    def _until(self, ready: Callable[[], bool], pending: Callable[[], tuple[int, ...]]) -> None:
        board, clock = self._board, time.perf_counter
        until = clock() + _SPIN
        while clock() < until:
            if ready():
                return
            board.check()
            _yield()
        try:
            self._sleep_until(ready, pending)
        finally:
            board.awaits = None

    def _sleep_until(
        self, ready: Callable[[], bool], pending: Callable[[], tuple[int, ...]]
    ) -> None:
        """Sleep between polls, and let the other ranks know for whom this one waits."""
        began = time.perf_counter()
        while not ready():
            self._board.check()
            if time.perf_counter() - began < _SHORT:
                time.sleep(_NAP)
                continue
            self._board.awaits = pending() or None
            time.sleep(_SLEEP)

    def broken(self, error: Exception) -> NoReturn:
        """After an error of MPI itself: wait until the signs of life tell which rank is gone."""
        for _ in range(int(_TELL / _SLEEP)):
            self._board.check()
            time.sleep(_SLEEP)
        self._board.fail(Failure(f"the network to another rank broke: {line(error)}"))
        self._board.check()
        raise PeerError(line(error))


def _pending(requests: Iterable[Any], ranks: Sequence[int]) -> tuple[int, ...]:
    pairs = zip(requests, ranks, strict=False)
    return tuple(rank for request, rank in pairs if not request.Test())


def _yield() -> None:
    """Let another process have this core."""
    os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)


def flat(array: Array) -> Array:
    """The bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8)
