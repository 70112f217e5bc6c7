"""Lock files between processes and threads, on `filelock`."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Generator[bool]:
    """Hold the lock file `path` during the block and remove it afterwards.

    `waiting` is called once if another process or thread holds the lock; it may raise. A process
    that dies releases its lock. Yields False, and locks nothing, on a disk without locks. OSError
    where the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, mode=0o666, fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        path.unlink(missing_ok=True)
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)  # before the release, so that no other process's is removed
        lock.release()
