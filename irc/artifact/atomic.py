"""Writes folders and files that appear complete or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import Error
from .locks import locked

PART, OLD = ".part", ".old"
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_folder(output: Path, replaceable: Callable[[Path], bool]) -> Generator[Path]:
    """A temporary sibling of `output` that is renamed to it when the block ends without an error.

    After an error, a full disk and ctrl-C included, the sibling and the parent folders made for it
    are removed; an `unfinished_folder` stays. Siblings that a killed process left are removed at
    the start. An existing folder is replaced only if it is empty or `replaceable`, at the start and
    at the end. One process at a time writes a folder.
    """
    output = Path(os.path.realpath(output))
    with ExitStack() as stack:
        stack.enter_context(_errors_named(output))
        _check_replaceable(output, replaceable)
        stack.enter_context(_parents(output.parent))
        if stack.enter_context(_locked(output)):
            _remove_orphans(output)
        part = output.with_name(f"{_prefix(output)}{secrets.token_hex(4)}{PART}")
        part.mkdir()
        try:
            yield part
            _replace(part, output, replaceable)
            shutil.rmtree(unfinished_folder(part), ignore_errors=True)
        finally:
            with _uninterrupted():
                if part.exists():
                    shutil.rmtree(part)


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """A file open for writing that is renamed to `path` if the block ends without an error.

    OSError as from open.
    """
    part = path.parent / f".{path.name}.{secrets.token_hex(4)}{PART}"
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_space(folder: Path, nbytes: int) -> None:
    """An Error where the disk of a folder has no space for so many bytes."""
    free = shutil.disk_usage(folder).free if folder.is_dir() else nbytes
    if nbytes > free:
        raise Error(
            f"{nbytes:,} bytes of weights are to be written, and the disk of {folder.parent} has "
            f"{free:,} free; check the sizes of the weights, or choose another disk with -o"
        )


def unfinished_folder(part: Path) -> Path:
    """A sibling of an output, given by the temporary folder of its writer, that outlives an
    interrupted writer: the next one continues with what it holds, and removes it."""
    name = re.fullmatch(rf"\.(.*)\.irc-\w{{8}}{re.escape(PART)}", part.name)
    return part.with_name(f"{_prefix(Path(name[1] if name else part.name))}unfinished")


def orphaned_folders(output: Path) -> list[Path]:
    """The siblings that killed writers of `output` left; none while a process writes it."""
    unfinished = [*_siblings(output), *filter(Path.is_dir, [unfinished_folder(output)])]
    with suppress(Error, OSError):
        if unfinished:
            with _locked(output) as alone:
                return unfinished if alone else []
    return []


def _siblings(output: Path) -> list[Path]:
    """The temporary folders of writers of `output`, living or dead."""
    name = re.compile(rf"{re.escape(_prefix(output))}\w{{8}}({PART}|{OLD})")
    there = sorted(output.parent.iterdir()) if output.parent.is_dir() else []
    return [p for p in there if name.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


def _prefix(output: Path) -> str:
    return f".{output.name}.irc-"


def _locked(output: Path) -> AbstractContextManager[bool]:
    """Hold the lock of a folder's writer; whether the disk has locks. An Error if it is held."""

    def refuse() -> None:
        raise Error(
            f"another process is writing {output}; wait for it, or choose another folder with -o"
        )

    return locked(output.with_name(f".{output.name}.irc-lock"), refuse)


def _remove_orphans(output: Path) -> None:
    """Remove what killed writers left; an older artifact they had moved aside comes back."""
    for path in _siblings(output):
        with suppress(OSError):
            if path.suffix == OLD and not output.exists():
                path.rename(output)
            else:
                shutil.rmtree(path)


def _check_replaceable(output: Path, replaceable: Callable[[Path], bool]) -> None:
    if not os.path.lexists(output):
        return
    if not output.is_dir():
        raise Error(f"{output} is a file; choose another folder with -o")
    if next(output.iterdir(), None) is not None and not replaceable(output):
        raise Error(
            f"{output} is not empty and no artifact of irc, so it is left alone; "
            "choose another folder with -o"
        )


@contextmanager
def _parents(parent: Path) -> Generator[None]:
    """Create a folder and its missing parents; after an error the empty new ones are removed."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with _uninterrupted():
            for folder in missing:
                with suppress(OSError):  # others use it
                    folder.rmdir()
        raise


def _replace(part: Path, output: Path, replaceable: Callable[[Path], bool]) -> None:
    """Rename `part` to `output`, and remove an older folder.

    Both change places at once where the system can do that. Elsewhere the older folder is moved
    aside first, and back if that fails; if the process is killed between, the next writer does it.
    """
    with _uninterrupted():
        _check_replaceable(output, replaceable)
        if not output.exists():
            part.rename(output)
            return
        aside = part.with_suffix(OLD)
        if _exchange(part, output):
            part.rename(aside)
        else:
            output.rename(aside)
            try:
                part.rename(output)
            except OSError:
                aside.rename(output)
                raise
        shutil.rmtree(aside, ignore_errors=True)  # what stays is an orphaned folder


def _exchange(a: Path, b: Path) -> bool:
    """Exchange the names of two folders atomically; False where the system or disk cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Delay ctrl-C and SIGTERM until the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _errors_named(output: Path) -> Generator[None]:
    """Turn an OSError, also one behind an Error, into an Error about writing `output`."""
    try:
        yield
    except (OSError, Error) as error:
        cause = error.__cause__ if isinstance(error, Error) else error
        if not isinstance(cause, OSError):
            raise
        reason = cause.strerror or str(cause)
        if cause.errno in _FULL:
            raise Error(
                f"the disk is full ({reason}), and of {output} nothing was left behind; free some "
                f"space, or choose a folder on another disk than {output.parent} with -o"
            ) from cause
        place = f"{reason} ({cause.filename or output})"
        raise Error(f"cannot write {output}: {place}; nothing was left behind") from cause
