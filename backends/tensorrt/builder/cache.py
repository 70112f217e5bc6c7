"""A folder of engines, each under a hash of everything that determines it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from irc.artifact.atomic import whole_file
from irc.artifact.checksums import sha256
from irc.artifact.locks import locked
from irc.artifact.manifest import Progress, advancing
from irc.backends.tensorrt.builder.report import Report
from irc.errors import Error
from irc.files import sharing_problem
from irc.schema import read_json

FORMAT = 2  # raised whenever the builder or its report changes
VARIABLE = "IRC_CACHE"  # the environment variable with the user's folder
LIMIT = 32 << 30  # bytes of engines that are kept


def default_folder() -> Path | None:
    """The user's cache: `$IRC_CACHE`, or `irc/engines` in the system's folder for caches.

    None for a user without a home folder, as in containers.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "irc" / "engines" if os.path.isabs(base) else None


def key_of(facts: Mapping[str, Any]) -> str:
    """The hash of the facts that determine an engine's bytes, in any order."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """An engine of a cache: its bytes, and when it was last used, in seconds since 1970."""

    key: str
    size: int
    used: float


class _Busy(Exception):
    """Another process has the lock of an engine."""


class Cache:
    """A folder of `{key}.engine` and `{key}.json`; each file appears when it is complete.

    An engine may be a hard link shared with artifacts, so its bytes are hashed (about a second per
    gigabyte) whenever it is used: a change in any of them is detected.
    """

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit

    def lock(self, key: str, waiting: Callable[[], None]) -> AbstractContextManager[bool]:
        """Hold the lock of a key; `waiting` is called while another process holds it."""
        return locked(self.folder / f"{key}.lock", waiting)

    def fetch(self, key: str, engine: Path, progress: Progress) -> tuple[Report, str] | None:
        """Put the engine of a key at `engine`, and return its report and the `sha256:...` of its
        bytes; None if there is none, or a damaged one or one that other users can write, which is
        deleted."""
        kept, entry = self._paths(key)
        try:
            known = _read(entry)
            stage = f"reading {engine.name} from the cache"
            intact = sha256(kept, advancing(stage, [kept], progress)) == known[1]
            intact = intact and not sharing_problem(entry)
        except (OSError, Error):
            intact, known = False, None
        if not intact or known is None:
            self._drop(key)
            return None
        link_or_copy(kept, engine)
        with suppress(OSError):
            os.utime(entry)  # the least recently used ones are deleted first
        return known

    def store(self, key: str, engine: Path, report: Report, progress: Progress) -> str:
        """Keep an engine and return its hash; the least recently used ones beyond the limit are
        deleted. OSError if the folder cannot be written."""
        kept, entry = self._paths(key)
        link_or_copy(engine, kept)
        stage = f"writing {engine.name} to the cache"
        found = sha256(kept, advancing(stage, [kept], progress))
        with whole_file(entry) as file:
            file.write(json.dumps({"engine": found, "report": report.to_json()}).encode())
        self._shrink(key)
        return found

    def entries(self) -> list[Entry]:
        """The engines, the most recently used first."""
        found: list[Entry] = []
        for path in self.folder.glob("*.json"):
            if not re.fullmatch(r"[0-9a-f]{64}", path.stem):
                continue  # no file of a cache
            with suppress(FileNotFoundError):  # another process has just deleted it
                size = path.with_suffix(".engine").stat().st_size
                found.append(Entry(path.stem, size, path.stat().st_mtime))
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def report(self, key: str) -> Report | None:
        """The report of an engine, None if it is gone or damaged."""
        try:
            return _read(self._paths(key)[1])[0]
        except Error:
            return None

    def clear(self) -> list[Entry]:
        """Delete the engines that no process is using, and timing caches; returns the engines."""
        for path in self.folder.glob("timing-tensorrt*.cache"):
            path.unlink(missing_ok=True)
        return [entry for entry in self.entries() if self._drop_unused(entry.key)]

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.engine", self.folder / f"{key}.json"

    def _drop(self, key: str) -> None:
        for path in reversed(self._paths(key)):
            path.unlink(missing_ok=True)

    def _drop_unused(self, key: str) -> bool:
        """Delete an engine unless another process has its lock; whether it was deleted."""
        with suppress(_Busy), self.lock(key, _refuse):
            self._drop(key)
            return True
        return False

    def _shrink(self, newest: str) -> None:
        total = 0
        for entry in self.entries():
            total += entry.size
            if total > self.limit and entry.key != newest:
                self._drop_unused(entry.key)


def _refuse() -> None:
    raise _Busy


def open_cache(folder: Path | None) -> tuple[Cache | None, str]:
    """The cache in `folder` (default: the user's), and "".

    None and a warning if the user's folder cannot be used; an Error if `folder` cannot.
    """
    place = default_folder() if folder is None else folder
    if place is None:
        problem = "this user has no home folder for a cache of engines"
        return None, f"{problem}, so they are built each time; set {VARIABLE} to a folder"
    try:
        place.mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            problem = sharing_problem(place)
        if not problem:
            return Cache(place), ""
    except OSError as error:
        problem = f"the cache of engines {place} cannot be written ({error.strerror})"
    if folder is not None:
        raise Error(f"{problem}; name another folder, or none")
    return None, f"{problem}, so engines are built each time; set {VARIABLE} to another folder"


class _Kept(TypedDict):
    """What is known of an engine in a cache: the hash of its bytes, and the builder's report."""

    engine: str
    report: Report


def _read(entry: Path) -> tuple[Report, str]:
    found = read_json(entry, _Kept)
    return found["report"], found["engine"]


def link_or_copy(source: Path, target: Path) -> None:
    """Replace `target` by a hard link to `source`, or by a copy if links are not possible."""
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        try:
            os.link(source, part)
        except OSError:
            shutil.copyfile(source, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
