"""Locks between processes, which a process that dies lets go: on a path, and on a folder."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

_EVERY = 0.05  # seconds between two looks at a lock that is held
_LACKING = (errno.ENOLCK, errno.EOPNOTSUPP)  # what a disk without locks answers


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Generator[None]:
    """Hold the lock file `path` for the length of the block; it is gone afterwards.

    `waiting` is called, again and again, as long as another process or thread holds it. A process
    that dies lets go. OSError where the folder cannot be written. Where the system or the disk
    has no such locks, nothing is locked: what is written takes its name whole, and the last one
    stays.
    """
    if find_spec("fcntl") is None:
        yield
        return
    descriptor: int | None = -1
    try:
        while descriptor == -1:
            descriptor = _take(path)
            if descriptor == -1:
                waiting()
                time.sleep(_EVERY)
        yield
    finally:
        if descriptor != -1:
            path.unlink(missing_ok=True)  # while it is held, so that nobody removes another's
            if descriptor is not None:
                os.close(descriptor)


def _take(path: Path) -> int | None:
    """The descriptor that holds the lock, -1 where another one does, None on a disk without."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        return _kept(path, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        return None


@contextmanager
def held(folder: Path, wait: bool = True) -> Generator[bool]:
    """Hold a folder for the length of the block, under whatever name it has then.

    Gives whether it is held: not where the folder is gone, where the system or its disk has no such
    locks, or, without `wait`, where another process or thread holds it.
    """
    descriptor = _hold(folder, wait)
    try:
        yield descriptor >= 0
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _hold(folder: Path, wait: bool) -> int:
    """The descriptor that holds a folder, or -1."""
    if find_spec("fcntl") is None:
        return -1
    import fcntl

    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    how = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
    try:
        descriptor = _kept(folder, os.open(folder, flags), how)
        while wait and descriptor < 0:  # its last holder has put another one there
            descriptor = _kept(folder, os.open(folder, flags), how)
    except OSError:  # it is gone, or no folder, or another user's, or cannot be locked there
        return -1
    return descriptor


def _kept(path: Path, descriptor: int, how: int) -> int:
    """The descriptor once it holds what is at `path`; -1, and it is closed, where it does not."""
    import fcntl

    try:
        fcntl.flock(descriptor, how)
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
    """Whether what is locked is what lies at `path`: its last holder may have removed it."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
