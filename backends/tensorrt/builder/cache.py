"""Engines built before, in a folder, under a hash of everything that makes them what they are."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irc.artifact import Progress, advancing
from irc.atomic import whole_file
from irc.backends.tensorrt.builder.report import Report
from irc.checksums import sha256
from irc.errors import Error
from irc.locks import locked

FORMAT = 1  # to be raised when an engine of the same key would be built otherwise
FOLDER = "IRC_CACHE"  # the environment's name for the user's own folder
LIMIT = 32 << 30  # bytes of engines that are kept


def default_folder() -> Path | None:
    """The user's own cache: `$IRC_CACHE`, or `irc/engines` below the system's folder for caches.

    None for a user without a home, as containers have.
    """
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "irc" / "engines" if os.path.isabs(base) else None


def key_of(facts: Mapping[str, Any]) -> str:
    """The hash of what decides an engine's bytes, as JSON with sorted keys."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Kept:
    """An engine of the cache: what is known of it, and the `sha256:...` of all its bytes."""

    report: Report
    hash: str


class Cache:
    """A folder of `{key}.engine` and `{key}.json`; every file takes its name when it is whole.

    An engine here and the artifacts that have it may be one file, so its bytes are hashed whole,
    about a second for a gigabyte: a change in any of them is seen before the next one gets it.
    """

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit

    def lock(self, key: str, waiting: Callable[[], None]) -> AbstractContextManager[None]:
        """Held while the engine of a key is built."""
        return locked(self.folder / f"{key}.lock", waiting)

    def take(self, key: str, engine: Path, tell: Progress) -> Kept | None:
        """Put the engine of a key at `engine`; None where there is none.

        One whose bytes are not what they were is thrown away.
        """
        kept, entry = self._paths(key)
        try:
            found = json.loads(entry.read_bytes())
            known = Kept(Report.from_json(found["report"]), found["engine"])
            stage = f"reading {engine.name}, which was built before"
            whole = sha256(kept, advancing(stage, [kept], tell)) == known.hash
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            whole, known = False, None
        if not whole or known is None:
            self._drop(key)
            return None
        place(kept, engine)
        with suppress(OSError):
            os.utime(entry)  # it was used: others go first
        return known

    def keep(self, key: str, engine: Path, report: Report, tell: Progress) -> str:
        """Keep an engine; the ones that were used longest ago make room. OSError as it comes.

        Returns the engine's hash, empty where nothing is kept.
        """
        kept, entry = self._paths(key)
        place(engine, kept)
        stage = f"keeping {engine.name} for another time"
        found = sha256(kept, advancing(stage, [kept], tell))
        text = json.dumps({"engine": found, "report": report.to_json()})
        with whole_file(entry) as file:
            file.write(text.encode())
        self._make_room(key)
        return found

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.engine", self.folder / f"{key}.json"

    def _drop(self, key: str) -> None:
        for path in reversed(self._paths(key)):
            path.unlink(missing_ok=True)

    def _make_room(self, key: str) -> None:
        entries = sorted(self.folder.glob("*.json"), key=lambda path: -_used(path))
        total = 0
        for entry in entries:
            with suppress(FileNotFoundError):  # another process has just removed it
                total += entry.with_suffix(".engine").stat().st_size
            if total > self.limit and entry.stem != key:
                self._drop(entry.stem)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # another process has just removed it


class NoCache(Cache):
    """Keeps nothing."""

    def __init__(self) -> None:
        super().__init__(Path())

    def lock(self, key: str, waiting: Callable[[], None]) -> AbstractContextManager[None]:
        """Nobody has to wait."""
        return nullcontext()

    def take(self, key: str, engine: Path, tell: Progress) -> Kept | None:
        """Never anything."""
        return None

    def keep(self, key: str, engine: Path, report: Report, tell: Progress) -> str:
        """Nothing to do."""
        return ""


def open_cache(folder: Path | None) -> tuple[Cache, str]:
    """The cache, and a warning where the user's own cannot be used.

    A folder that was named and cannot be used is an Error.
    """
    place = default_folder() if folder is None else folder
    if place is None:
        problem = "this user has no home folder, and so no cache of engines"
        return NoCache(), f"{problem}: they are built anew each time; set {FOLDER} to a folder"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return Cache(place), ""
    except OSError as error:
        problem = f"the cache of engines {place} cannot be written ({error.strerror})"
    if folder is not None:
        raise Error(f"{problem}; name another folder, or none")
    return NoCache(), f"{problem}, so engines are built anew each time; set {FOLDER} to another"


def place(source: Path, target: Path) -> None:
    """Let a file be at `target` too, whole or not at all: by a link where one is possible."""
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        try:
            os.link(source, part)
        except OSError:
            shutil.copyfile(source, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
