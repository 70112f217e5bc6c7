"""Waiting for a GPU with a deadline and a health check, also while it spins in a captured graph."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from irc.backends.ranks.communicator import PeerError
from irc.errors import Error

from .driver import Event as StreamEvent
from .driver import Stream
from .group import Group, abort

_SPIN = 0.02  # seconds of polling without a pause, within which a decode step ends
_PAUSE = 2e-4
_CHECK = 0.05  # seconds between health checks


def wait(
    stream: Stream | StreamEvent,
    groups: Sequence[Group],
    what: str = "the work",
    seconds: float | None = None,
) -> None:
    """Wait until a stream, or a place in it, is done, whose collectives belong to these groups.

    All groups are aborted and a PeerError raised once the run, NCCL or the GPU has failed, or after
    `seconds` (default: the timeout of the groups).
    """
    begin = time.monotonic()
    work = _Work(groups, what, begin, seconds)
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
            if problem := work.problem(now):
                raise PeerError(problem)
        time.sleep(0 if now - begin < _SPIN else _PAUSE)


class _Work:
    """Something that runs on a GPU, with its deadline."""

    def __init__(
        self, groups: Sequence[Group], what: str, begin: float, seconds: float | None
    ) -> None:
        self.groups, self.what = groups, what
        self.seconds = min(group.timeout for group in groups) if seconds is None else seconds
        self.deadline = begin + self.seconds

    def problem(self, now: float, own_thread: bool = True) -> str:
        """Why the work will not end, after aborting the groups; empty where nothing is wrong.

        NCCL is not asked from another thread, which may be in a call of NCCL.
        """
        for group in self.groups:
            try:
                group.check() if own_thread else group.check_run()
            except PeerError as error:
                abort(self.groups, error.message)
                return error.message
        if now > self.deadline:
            return abort(self.groups, f"{self.what} did not end within {self.seconds:.0f} seconds")
        return ""


@contextmanager
def watched(groups: Sequence[Group], what: str, seconds: float | None = None) -> Generator[None]:
    """Inside, a thread aborts the groups when a call blocks this thread, and a rank is lost.

    For calls that cannot be polled, as a library that waits inside its own code. A PeerError where
    a rank was lost, or after `seconds` (default: the timeout of the groups).
    """
    work, done, found = _Work(groups, what, time.monotonic(), seconds), Event(), list[str]()

    def watch() -> None:
        while not found and not done.wait(_CHECK):
            if problem := work.problem(time.monotonic(), own_thread=False):
                found.append(problem)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if found:
            raise PeerError(found[0]) from error
        raise
    finally:
        done.set()
        thread.join()
    if found:
        raise PeerError(found[0])
