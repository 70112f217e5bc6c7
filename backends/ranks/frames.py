"""What the ranks tell the irc that started them, in frames on their standard output.

MPI's launcher joins the output of all processes and adds words of its own. In frames, text keeps
its order and its stream, and the exit status is known. A frame is a line: a mark that nothing else
prints, and a kind and a text as JSON.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO, cast

OUT, ERR, MET, EXIT = "out", "err", "met", "exit"
OTHER = ""  # text outside of frames


class FrameWriter:
    """Writes frames to file descriptor 1 of a rank."""

    def __init__(self, token: str) -> None:
        self._mark = _mark(token)

    def write(self, kind: str, text: str = "") -> None:
        """Write one frame."""
        left = memoryview(self._mark + json.dumps([kind, text]).encode() + b"\n")
        while left:
            left = left[os.write(1, left) :]

    def stream(self, kind: str, terminal: bool) -> TextIO:
        """A text stream of frames. `terminal`: whether a person reads them on one."""
        return cast(TextIO, _Stream(self, kind, terminal))


class _Stream(io.TextIOBase):
    encoding = "utf-8"

    def __init__(self, frames: FrameWriter, kind: str, terminal: bool) -> None:
        self._frames, self._kind, self._terminal = frames, kind, terminal

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str, /) -> int:
        self._frames.write(self._kind, text)
        return len(text)


class FrameReader:
    """Finds frames in bytes as they come."""

    def __init__(self, token: str) -> None:
        self._mark, self._held = _mark(token), b""

    def feed(self, data: bytes) -> Iterator[tuple[str, str]]:
        """(kind, text) of the complete frames so far, and of the lines between them."""
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            other, mark, frame = line.rpartition(self._mark)
            if not mark:
                yield OTHER, line.decode(errors="replace") + "\n"
                continue
            if other:
                yield OTHER, other.decode(errors="replace")
            with suppress(ValueError):  # the launcher's words are within the frame
                kind, text = json.loads(frame)
                yield kind, text


def _mark(token: str) -> bytes:
    return b"\0" + token.encode() + b" "
