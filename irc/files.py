"""Files that others may have written: opened, placed, and checked for who can write them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """A file open for reading bytes; OSError, also for a pipe, which would wait for a writer."""
    name = os.fspath(path)
    if "\0" in name:
        raise OSError(errno.EINVAL, "the path has a NUL character", name)
    mode = os.stat(name).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", name)
    return open(name, "rb")


def stays_in(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether a file lies below a folder, links followed.

    The files of a snapshot in a Hugging Face cache are links to the `blobs` beside its snapshots.
    """
    place = Path(os.path.realpath(folder))
    for above in (place, *place.parents):
        if above.name == "snapshots" and (above.parent / "blobs").is_dir():
            place = above.parent
            break
    return "\0" not in os.fspath(path) and place in Path(os.path.realpath(path)).parents


def sharing_problem(path: str | os.PathLike[str]) -> str:
    """Why another user could have written a file or folder of a cache; empty if none could."""
    try:
        facts, parent = os.stat(path), os.stat(os.path.dirname(os.path.abspath(path)))
    except OSError:
        return ""
    if facts.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user"
    reached = parent.st_mode & (stat.S_IXGRP | stat.S_IXOTH)
    if reached and facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        is_folder = stat.S_ISDIR(facts.st_mode)  # irc makes it again, for this user alone
        then = "" if is_folder else f", then chmod go-rwx {os.path.dirname(path)}"
        return f"other users can write {path} (delete it{then})"
    return ""
