"""Files of weights as they are written, also by a compilation that continues an interrupted one."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from irc.artifact.atomic import unfinished_folder
from irc.errors import Error
from irc.schema import read_json

_JOURNAL = "finished.json"
_READ = 1 << 20  # bytes that are hashed at a time


class Writer:
    """A file of weights, and the hash of its bytes as long as they are written in order.

    The first `end` bytes are there already.
    """

    def __init__(self, path: Path, end: int = 0) -> None:
        if end and path.stat().st_size < end:
            raise Error(f"{path} lacks weights that its journal counts as finished; compile again")
        self.file = path.open("r+b" if end else "wb")
        self._digest: Any = hashlib.sha256()
        self._end = end
        self.file.truncate(end)
        while end:
            end -= len(block := self.file.read(min(end, _READ)))
            self._digest.update(block)

    def write(self, offset: int, block: memoryview) -> int:
        """Write bytes at an offset; their number. Bytes that nothing is written to are zeros."""
        if offset < self._end:  # shards of one weight, in turns
            self._digest = None
        if self._digest is not None:
            self._digest.update(bytes(offset - self._end))
            self._digest.update(block)
        self._end = offset + block.nbytes
        self.file.seek(offset)
        return self.file.write(block)

    @property
    def hash(self) -> str:
        """`sha256:...`, empty where it is not known."""
        return "" if self._digest is None else f"sha256:{self._digest.hexdigest()}"


class _Journal(TypedDict):
    identity: str
    count: int


class Unfinished:
    """A folder beside the output whose weights a killed or interrupted writer has finished.

    The next writer of the same weights continues with those after `count`. `identity` is a hash of
    all that the bytes depend on.
    """

    def __init__(self, part: Path, identity: str) -> None:
        self.folder, self.count = unfinished_folder(part), 0
        self._identity = identity
        with suppress(Error):  # damaged, or none: all is written again
            journal = read_json(self.folder / _JOURNAL, _Journal)
            if journal["identity"] == identity:
                self.count = max(journal["count"], 0)
        if not self.count:
            self.remove()
            self.folder.mkdir()

    def record(self, count: int) -> None:
        """State that the first `count` weights are in the files."""
        new = self.folder / f"{_JOURNAL}.new"
        text = json.dumps({"identity": self._identity, "count": count})
        new.write_text(text, encoding="utf-8")
        new.replace(self.folder / _JOURNAL)

    def move_to(self, folder: Path) -> None:
        """Move the files of weights, which are complete."""
        (self.folder / _JOURNAL).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            path.replace(folder / path.name)
        self.remove()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
