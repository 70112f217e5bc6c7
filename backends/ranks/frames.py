"""What the ranks tell the irc that started them, in frames on their standard output.

MPI's launcher joins the output of all processes and adds words of its own. In frames, text keeps
its order and its stream, and the exit status is known. A frame is a mark that nothing else prints,
a kind, the length of the data, a line break, and the data.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

OUT, ERR, MET, EXIT = "out", "err", "met", "exit"
OTHER = ""  # data outside of frames


class FrameWriter:
    """Writes frames to file descriptor 1 of a rank."""

    def __init__(self, token: str) -> None:
        self._mark = _mark(token)

    def write(self, kind: str, data: bytes) -> None:
        """Write one frame."""
        left = memoryview(self._mark + f"{kind} {len(data)}\n".encode() + data)
        while left:
            left = left[os.write(1, left) :]

    def stream(self, kind: str, terminal: bool) -> io.TextIOWrapper:
        """A text stream of frames. `terminal`: whether a person reads them on one."""
        buffered = io.BufferedWriter(_Raw(self, kind, terminal))
        return io.TextIOWrapper(buffered, encoding="utf-8", line_buffering=kind == ERR)


class _Raw(io.RawIOBase):
    def __init__(self, frames: FrameWriter, kind: str, terminal: bool) -> None:
        self._frames, self._kind, self._terminal = frames, kind, terminal

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._terminal

    def write(self, data: Any, /) -> int:
        self._frames.write(self._kind, bytes(data))
        return len(data)


class FrameReader:
    """Finds frames in bytes as they come."""

    def __init__(self, token: str) -> None:
        self._mark, self._held = _mark(token), b""

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """The complete frames so far, by kind, and the data between them."""
        self._held += data
        while self._held:
            before, mark, rest = self._held.partition(self._mark)
            if not mark:
                yield from self._outside()
                return
            head, end, body = rest.partition(b"\n")
            kind, _, length = head.decode(errors="replace").partition(" ")
            if before:
                yield OTHER, before
                self._held = mark + rest
            if not end or len(body) < int(length):
                return
            self._held = body[int(length) :]
            yield kind, body[: int(length)]

    def _outside(self) -> Iterator[tuple[str, bytes]]:
        """Everything but a possible beginning of a mark."""
        start = self._held.rfind(self._mark[:1])
        keep = len(self._held) if start < 0 or len(self._held) - start >= len(self._mark) else start
        text, self._held = self._held[:keep], self._held[keep:]
        if text:
            yield OTHER, text


def _mark(token: str) -> bytes:
    return b"\0" + token.encode() + b" "
