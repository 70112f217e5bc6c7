"""Waiting for a GPU with a deadline, also while it spins in a captured graph."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from irc.backends.communicator import PeerError
from irc.errors import Error

if TYPE_CHECKING:
    from .group import Group

_SPIN = 0.02  # seconds of looking without a pause, within which a decode step ends
_PAUSE = 2e-4
_GLANCE = 0.05  # seconds between looks at NCCL's errors and the other processes
_GRACE = 1.0  # seconds that a rank may still need after another one has ended


def wait(
    stream: int, groups: Sequence[Group], what: str = "the work", seconds: float | None = None
) -> None:
    """Wait until a stream is done, with the groups whose collectives may be on it.

    A PeerError on every rank, and all groups are aborted, once a peer has ended, NCCL or the GPU
    reports an error, or it takes longer than `seconds` (default: the groups' timeout).
    """
    begin = time.monotonic()
    watch = _Look(groups, begin + (seconds or min(group.timeout for group in groups)), what)
    ready, glance = groups[0].driver.ready, begin + _GLANCE
    while True:
        try:
            if ready(stream):
                return
        except Error as error:
            raise PeerError(watch.end(f"{what} failed: {error.message}")) from error
        now = time.monotonic()
        if now > glance:
            glance = now + _GLANCE
            if reason := watch.problem(now):
                raise PeerError(watch.end(reason))
        time.sleep(0 if now - begin < _SPIN else _PAUSE)


class _Look:
    """What can be wrong while something runs."""

    def __init__(self, groups: Sequence[Group], deadline: float, what: str) -> None:
        self.groups, self.deadline, self.what = groups, deadline, what
        self._begin, self._missed = time.monotonic(), 0.0

    def problem(self, now: float) -> str:
        """Why to give up, or nothing."""
        for group in self.groups:
            try:
                group.check()
            except PeerError as error:
                return f"{self.what} cannot end: {error.message}"
            if group.lost():
                self._missed = self._missed or now
        if self._missed and now - self._missed > _GRACE:
            return f"{self.what} cannot end"
        if now > self.deadline:
            return f"{self.what} did not end within {self.deadline - self._begin:.0f} seconds"
        return ""

    def end(self, reason: str) -> str:
        """Abort all groups; the message of one that has something to say."""
        from .group import end_all

        said = end_all(self.groups, reason)
        told = [text for text, group in zip(said, self.groups, strict=True) if group.lost()]
        return (told or said)[0]


class Watchdog:
    """A thread that ends the groups when something blocks this one for too long.

    For calls that cannot be polled, as a library that waits inside of its own code:

        with watchdog.during("the prefill"):
            context.execute_async_v3(stream)
    """

    def __init__(self, groups: Sequence[Group], seconds: float | None = None) -> None:
        self.groups, self.failure = tuple(groups), ""
        self.seconds = seconds or min(group.timeout for group in groups)
        self._look: _Look | None = None
        self._lock, self._stop = Lock(), Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Inside, this thread has `seconds`; a PeerError after it where that was not enough."""
        with self._lock:
            self._look = _Look(self.groups, time.monotonic() + self.seconds, what)
        try:
            yield
        except Exception as error:
            if self.failure:
                raise PeerError(self.failure) from error
            raise
        finally:
            with self._lock:
                self._look = None
        if self.failure:
            raise PeerError(self.failure)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_GLANCE):
            with self._lock:
                look = self._look
                reason = look.problem(time.monotonic()) if look else ""
                if look and reason:
                    self.failure = look.end(reason)
                    return
