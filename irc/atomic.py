"""Writes folders and files that are there whole or not at all, whatever goes wrong on the way."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from .errors import Error
from .leftovers import OLD, clear, temporary
from .locks import held

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_folder(output: Path, replaceable: Callable[[Path], bool]) -> Generator[Path]:
    """A temporary sibling of `output` that takes its name when the block ends well.

    If the block raises (a full disk and ctrl-C too), the sibling and every parent folder made for
    it are removed again; those that a killed process left are removed now. A folder that is in the
    way, at the start or at the end, is replaced only if it is empty or `replaceable` says so.
    """
    output = Path(os.path.realpath(output))
    with held(output.parent):  # not while another process changes places
        _check_place(output, replaceable)
        clear(output)
    made: list[Path] = []
    part: Path | None = None
    with ExitStack() as stack:
        try:
            _make_parents(output.parent, made)
            part = stack.enter_context(temporary(output))
            part.chmod(0o777 & ~_umask())
            yield part
            _take_place(part, output, replaceable)
        except BaseException as error:
            with _uninterrupted():
                _remove(part, made)
            cause = error.__cause__ if isinstance(error, Error) else error
            if isinstance(cause, OSError):
                raise _failure(cause, output) from cause
            raise


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """A file open for writing that takes its name if the block ends well; OSError as from open."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _check_place(output: Path, replaceable: Callable[[Path], bool]) -> None:
    if not output.name:
        raise Error("the root of the file system cannot be an artifact folder; choose another -o")
    if not os.path.lexists(output):
        return
    if not output.is_dir():
        raise Error(f"{output} is a file; choose another folder with -o")
    if next(output.iterdir(), None) is not None and not replaceable(output):
        raise Error(
            f"{output} is not empty and no artifact of irc, so it is left alone; "
            "choose another folder with -o"
        )


def _make_parents(parent: Path, made: list[Path]) -> None:
    """Create a folder and what is missing above it; `made` gets what is new, innermost first."""
    missing: list[Path] = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    for folder in reversed(missing):
        try:
            folder.mkdir()
        except FileExistsError:  # another writer has just made it
            if not folder.is_dir():
                raise
        else:
            made.insert(0, folder)


def _take_place(part: Path, output: Path, replaceable: Callable[[Path], bool]) -> None:
    """Rename; an older folder steps aside first, and comes back if the rename fails.

    What has come there since the start is asked about like what was there. The parent is held so
    that two writers do this one after the other, and the older folder so that nobody takes it for a
    leftover while it is aside.
    """
    with _uninterrupted(), held(output.parent), held(output):
        _check_place(output, replaceable)
        if not output.exists():
            part.rename(output)
            return
        aside = part.with_suffix(OLD)
        output.rename(aside)
        try:
            part.rename(output)
        except OSError:
            aside.rename(output)
            raise
        try:
            shutil.rmtree(aside)
        except OSError as error:
            raise Error(
                f"{output} is written, but the older one could not be removed "
                f"({error.strerror}); delete {aside}"
            ) from None


def _remove(part: Path | None, made: list[Path]) -> None:
    if part is not None and part.exists():
        shutil.rmtree(part)
    for folder in made:
        if folder.is_dir() and next(folder.iterdir(), None) is None:
            folder.rmdir()


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Ctrl-C waits until the block is done (where the system lets a thread ask for that)."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _failure(error: OSError, output: Path) -> Error:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return Error(
            f"the disk is full ({reason}) and nothing was left behind; "
            f"free some space, or choose a folder on another disk than {output.parent} with -o"
        )
    place = error.filename or output
    return Error(f"cannot write {output}: {reason} ({place}); nothing was left behind")
