"""Waiting for a GPU with a health check, also while it spins in a captured graph.

A rank that waits for another one spins on its GPU, and cannot be told from one that computes. So
streams have marks between their work, and a wait ends once no GPU of the run has passed one for
some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

import numpy as np

from irc.backends.ranks.communicator import PeerError
from irc.errors import Error

from .driver import Event as StreamEvent
from .driver import Stream
from .group import Deadline, Group, abort

if TYPE_CHECKING:
    from .execute.memory import Memory

_SPIN = 0.02  # seconds of polling without a pause, within which a decode step ends
_PAUSE = 2e-4
_CHECK = 0.05  # seconds between health checks
_NUMBERS = 1024  # of marks, then they repeat
_RUNS = 8  # that follow each other without a mark


class Marks:
    """Marks between the work of a stream: the GPU copies a number to host memory at each."""

    def __init__(self, memory: Memory, stream: Stream) -> None:
        self._stream, self._count, self._runs = stream, 0, 0
        self._passed = memory.host("mark", (1,), np.int32)
        self._passed[0] = 0
        self._numbers = memory.upload("marks", np.arange(1, _NUMBERS + 1, dtype=np.int32))

    def passed(self) -> int:
        """The number of the latest mark that the GPU has reached."""
        return int(self._passed[0])

    def enqueue(self) -> None:
        """Enqueue a mark; also into a graph under capture."""
        self._count = (self._count + 1) % _NUMBERS
        self._stream.download(self._passed, self._numbers + 4 * self._count)

    def after_run(self) -> None:
        """Enqueue a mark after some runs."""
        self._runs += 1
        if self._runs % _RUNS == 0:
            self.enqueue()


def wait(
    stream: Stream | StreamEvent,
    groups: Sequence[Group],
    what: str = "the work",
    seconds: float | None = None,
) -> None:
    """Wait until a stream, or a place in it, is done, whose collectives belong to these groups.

    All groups are aborted and a PeerError raised once the run, NCCL or the GPU has failed, or no
    rank has made progress for `seconds` (default: the timeout of the groups).
    """
    begin = time.monotonic()
    work = _Work(groups, what, seconds)
    next_check = begin + _CHECK
    while True:
        try:
            if stream.is_done():
                return
        except Error as error:
            raise PeerError(abort(groups, f"{what} failed: {error.message}")) from error
        now = time.monotonic()
        if now > next_check:
            next_check = now + _CHECK
            if problem := work.problem():
                raise PeerError(problem)
        time.sleep(0 if now - begin < _SPIN else _PAUSE)


class _Work:
    """Something that runs on a GPU, with its deadline."""

    def __init__(self, groups: Sequence[Group], what: str, seconds: float | None) -> None:
        self.groups, self.what = groups, what
        self.seconds = min(group.timeout for group in groups) if seconds is None else seconds
        self.deadline = Deadline(self.seconds, groups[0].progress)

    def problem(self, own_thread: bool = True) -> str:
        """Why the work will not end, after aborting the groups; empty where nothing is wrong.

        NCCL is not asked from another thread, which may be in a call of NCCL.
        """
        for group in self.groups:
            try:
                group.check() if own_thread else group.check_run()
            except PeerError as error:
                abort(self.groups, error.message)
                return error.message
        if self.deadline.is_over():
            stuck = f"{self.what} did not end, and no rank made progress for {self.seconds:.0f} s"
            return abort(self.groups, stuck)
        return ""


@contextmanager
def watched(groups: Sequence[Group], what: str, seconds: float | None = None) -> Generator[None]:
    """Inside, a thread aborts the groups when a call blocks this thread, and a rank is lost.

    For calls that cannot be polled, as a library that waits inside its own code. A PeerError where
    a rank was lost, or no rank made progress for `seconds` (default: the timeout of the groups).
    """
    work, done, problems = _Work(groups, what, seconds), Event(), list[str]()

    def watch() -> None:
        while not problems and not done.wait(_CHECK):
            if problem := work.problem(own_thread=False):
                problems.append(problem)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if problems:
            raise PeerError(problems[0]) from error
        raise
    finally:
        done.set()
        thread.join()
    if problems:
        raise PeerError(problems[0])
