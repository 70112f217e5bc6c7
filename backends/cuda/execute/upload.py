"""Copies bytes of files and arrays to the GPU, several reads ahead.

Bytes go through pieces of page-locked memory: while the GPU copies one, threads read the next ones.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from irc.backends.cuda.driver import Array, Driver, Event, Stream
from irc.errors import Error

PIECE = 8 << 20  # bytes of one piece of page-locked memory
_PIECES = 16
_READS = 8  # at the same time


@dataclass(frozen=True)
class Range:
    """Bytes of a file."""

    path: Path
    offset: int
    size: int


class Uploads:
    """Copies to one GPU; a context that ends when all are done, and may be entered again.

    `piece`: bytes of a piece. Pieces are allocated when they are first needed, and kept.
    """

    def __init__(self, driver: Driver, stream: Stream, piece: int = PIECE) -> None:
        self._driver, self._stream, self._piece = driver, stream, piece
        self._pieces: list[Array] = []
        self._copied: dict[int, Event] = {}  # by the number of a piece
        self._turns = cycle(range(_PIECES))

    def files(self, places: Iterable[tuple[Range, int]]) -> None:
        """Copy ranges of files to addresses, in this order."""
        reads: deque[tuple[Future[None], Array, int, int]] = deque()
        with Files() as files, ThreadPoolExecutor(_READS) as pool:
            for part, address in _parts(files, places, self._piece):
                turn, room = self._next()
                target = room[: part.size]
                reads.append((pool.submit(files.read, part, target), target, address, turn))
                if len(reads) == _PIECES:
                    self._upload(*reads.popleft())
            while reads:
                self._upload(*reads.popleft())

    def blocks(self, address: int, blocks: Iterable[Array]) -> None:
        """Copy arrays to an address, one behind the other."""
        for block in blocks:
            data = block.reshape(-1).view("u1")
            for start in range(0, data.size, self._piece):
                part = data[start : start + self._piece]
                turn, room = self._next()
                room[: part.size] = part
                self._enqueue(room[: part.size], address, turn)
                address += part.size

    def _next(self) -> tuple[int, Array]:
        """A piece that no copy reads any more, and its number."""
        turn = next(self._turns)
        if turn == len(self._pieces):
            self._pieces.append(self._driver.pinned(self._piece))
        if turn in self._copied:
            self._copied[turn].wait()
        return turn, self._pieces[turn]

    def _upload(self, read: Future[None], data: Array, address: int, turn: int) -> None:
        read.result()
        self._enqueue(data, address, turn)

    def _enqueue(self, data: Array, address: int, turn: int) -> None:
        self._stream.upload(address, data)
        self._copied[turn] = self._stream.event()

    def free(self) -> None:
        """Release the pieces, which no copy reads any more."""
        self._copied.clear()
        self._pieces.clear()
        self._turns = cycle(range(_PIECES))

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.wait("the upload of weights")


class Files:
    """Weight files, opened at their first use."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def check(self, wanted: Range) -> None:
        """An Error unless the file has these bytes."""
        size = self._try(wanted.path, lambda: os.fstat(self._opened(wanted.path)).st_size)
        end = wanted.offset + wanted.size
        if wanted.offset < 0 or end > size:
            raise Error(
                f"expected weights up to byte {end} of {wanted.path}, found a file of {size} "
                "bytes; it is not the file that was compiled"
            )

    def read(self, wanted: Range, target: Array) -> None:
        """Read bytes into an array of this size; several threads may do so."""
        view, done = target.data, 0
        file = self._opened(wanted.path)
        while done < wanted.size:
            at = wanted.offset + done
            count = self._try(
                wanted.path, lambda at=at, done=done: os.preadv(file, [view[done:]], at)
            )
            if not count:
                raise Error(f"{wanted.path} became shorter while it was read")
            done += count

    def _opened(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = self._try(path, lambda: os.open(path, os.O_RDONLY))
        return self._files[path]

    def _try(self, path: Path, work: Callable[[], int]) -> int:
        try:
            return work()
        except OSError as error:
            raise Error(
                f"cannot read the weight file {path}: {error.strerror or error}; put it back, or "
                "compile again (with --bundle the artifact keeps a copy of its own)"
            ) from None

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _parts(
    files: Files, places: Iterable[tuple[Range, int]], piece: int
) -> Iterator[tuple[Range, int]]:
    """The ranges in pieces, each with its address; an Error where a file is too short."""
    for wanted, address in places:
        files.check(wanted)
        for start in range(0, wanted.size, piece):
            size = min(piece, wanted.size - start)
            yield Range(wanted.path, wanted.offset + start, size), address + start
