"""`open_file`: a regular file, open for reading."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """A file open for reading bytes; OSError, also for a pipe, which would wait for a writer."""
    name = os.fspath(path)
    if "\0" in name:
        raise OSError(errno.EINVAL, "the path has a NUL character", name)
    mode = os.stat(name).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is no regular file", name)
    return open(name, "rb")
