"""A lock between processes on a path, so that two builds of one thing come one after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

_EVERY = 0.05  # seconds between two looks at a lock that is held


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Generator[None]:
    """Hold the lock file `path` for the length of the block; it is gone afterwards.

    `waiting` is called, again and again, as long as another process or thread holds it. A process
    that dies lets go. OSError where the folder cannot be written. Where the system has no such
    locks, nothing is locked: what is written takes its name whole, and the last one stays.
    """
    if find_spec("fcntl") is None:
        yield
        return
    descriptor = -1
    try:
        while descriptor < 0:
            descriptor = _take(path)
            if descriptor < 0:
                waiting()
                time.sleep(_EVERY)
        yield
    finally:
        if descriptor >= 0:
            path.unlink(missing_ok=True)  # while it is held, so that nobody removes another's
            os.close(descriptor)


def _take(path: Path) -> int:
    """The descriptor that holds the lock, or -1 where another one does."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still(path, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return -1


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file that is locked is the one at `path`: its last holder may have removed it."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
