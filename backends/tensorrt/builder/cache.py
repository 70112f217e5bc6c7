"""A folder of engines, each under a hash of everything that determines it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
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

FORMAT = 3  # raised whenever the builder or its report changes
VARIABLE = "IRC_CACHE"  # the environment variable with the user's folder
LIMIT = 32 << 30  # bytes of engines that are kept
_INSTEAD = f"set {VARIABLE} or --cache to another folder, or give --no-cache"


def default_folder() -> Path | None:
    """The user's cache: `$IRC_CACHE`, or `irc/engines` in the system's folder for caches.

    None for a user without a home folder, as in containers.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "irc" / "engines" if os.path.isabs(base) else None


def key_of(facts: Mapping[str, Any]) -> str:
    """The hash of the facts that determine an engine's bytes, in any order."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Kept(TypedDict):
    """What is known of an engine in a cache: the hash of its bytes, and the builder's report."""

    engine: str
    report: Report


@dataclass(frozen=True)
class Entry:
    """An engine of a cache: its bytes, and when it was last used, in seconds since 1970."""

    key: str
    size: int
    used: float


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

    def fetch(self, key: str, engine: Path, progress: Progress) -> Kept | None:
        """Put the engine of a key at `engine`, and return what is known of it; None if there is
        none, or a damaged one or one that other users can write, which is deleted."""
        kept, entry = self._paths(key)
        intact: Kept | None = None
        with suppress(OSError, Error):
            facts = read_json(entry, Kept)
            advance = advancing(f"reading {engine.name} from the cache", [kept], progress)
            if sha256(kept, advance) == facts["engine"] and not sharing_problem(entry):
                intact = facts
        if intact is None:
            self._drop(key)
            return None
        _link_or_copy(kept, engine)
        os.utime(entry)  # the least recently used ones are deleted first
        return intact

    def store(self, key: str, engine: Path, report: Report, progress: Progress) -> str:
        """Keep an engine and return its `sha256:...`; the least recently used ones beyond the limit
        are deleted. OSError if the folder cannot be written."""
        kept, entry = self._paths(key)
        _link_or_copy(engine, kept)
        hash = sha256(kept, advancing(f"writing {engine.name} to the cache", [kept], progress))
        with whole_file(entry) as file:
            file.write(json.dumps({"engine": hash, "report": report.to_json()}).encode())
        total = 0
        for old in self.entries():
            total += old.size
            if total > self.limit and old.key != key:
                self._drop_unused(old.key)
        return hash

    def entries(self) -> list[Entry]:
        """The engines, the most recently used first."""
        entries: list[Entry] = []
        for path in self.folder.glob("*.json"):
            if re.fullmatch(r"[0-9a-f]{64}", path.stem):  # else it is no file of a cache
                with suppress(FileNotFoundError):  # another process has just deleted it
                    size = path.with_suffix(".engine").stat().st_size
                    entries.append(Entry(path.stem, size, path.stat().st_mtime))
        return sorted(entries, key=lambda entry: entry.used, reverse=True)

    def report(self, key: str) -> Report | None:
        """The report of an engine, None if it is gone or damaged."""
        with suppress(Error):
            return read_json(self._paths(key)[1], Kept)["report"]
        return None

    def clear(self) -> list[Entry]:
        """Delete the engines that no process is using, and return them."""
        return [entry for entry in self.entries() if self._drop_unused(entry.key)]

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.engine", self.folder / f"{key}.json"

    def _drop(self, key: str) -> None:
        for path in reversed(self._paths(key)):
            path.unlink(missing_ok=True)

    def _drop_unused(self, key: str) -> bool:
        """Delete an engine unless another process has its lock; whether it was deleted."""

        def refuse() -> None:
            raise BlockingIOError

        with suppress(BlockingIOError), self.lock(key, refuse):
            self._drop(key)
            return True
        return False


def open_cache(folder: Path | None) -> Cache:
    """The cache in `folder`, by default the user's; an Error if it cannot be used."""
    folder = folder or default_folder()
    if folder is None:
        raise Error(f"this user has no home folder for a cache of engines; {_INSTEAD}")
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            problem = sharing_problem(folder)
    except OSError as error:
        problem = f"the cache of engines {folder} cannot be written ({error.strerror})"
    if problem:
        raise Error(f"{problem}; {_INSTEAD}")
    return Cache(folder)


def _link_or_copy(source: Path, target: Path) -> None:
    """Replace `target` by a hard link to `source`, or by a copy if links are not possible."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        try:
            os.link(source, part)
        except OSError:
            shutil.copyfile(source, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
