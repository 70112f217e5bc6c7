"""Uploads weights straight from the mapped checkpoint, each range of bytes once.

Bytes go through two pieces of page-locked memory: while the GPU copies one, the next range is read
into the other.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

import numpy as np

from irc.backends.cuda.driver import Array, Driver, Event, Stream
from irc.backends.tensorrt.runtime.plan import Binding
from irc.errors import Error

PIECE = 32 << 20  # bytes of one piece of page-locked memory
ALIGNMENT = 256
_Range: TypeAlias = tuple[Path, int, int]  # file, offset, size


class Weights:
    """The weights of one rank in device memory: `addresses` by the engine's inputs."""

    def __init__(
        self, driver: Driver, stream: Stream, bindings: Sequence[Binding], piece: int = PIECE
    ) -> None:
        self._driver = driver
        offsets: dict[_Range, int] = {}
        self.bytes = 0
        for each in bindings:
            key = (each.path, each.offset, each.size)
            if key not in offsets:
                offsets[key] = self.bytes
                self.bytes += -(-each.size // ALIGNMENT) * ALIGNMENT
        self._memory = _allocate(driver, self.bytes) if self.bytes else 0
        places = {key: self._memory + offset for key, offset in offsets.items()}
        self.addresses = {each.name: places[each.path, each.offset, each.size] for each in bindings}
        if self.bytes:
            _upload(driver, stream, piece, places)

    def free(self) -> None:
        """Free the memory."""
        if self._memory:
            self._driver.free(self._memory)
            self._memory = 0


def _allocate(driver: Driver, size: int) -> int:
    free = driver.free_memory()
    if size > free:
        raise Error(
            f"the weights of this rank take {size / 1e9:.2f} GB, and {driver.gpu.name} has "
            f"{free / 1e9:.2f} of {driver.gpu.memory / 1e9:.2f} GB free; compile for more ranks "
            "(--mesh tp=N), or end what else uses the GPU"
        )
    return driver.allocate(size)


def _upload(driver: Driver, stream: Stream, piece: int, places: Mapping[_Range, int]) -> None:
    """Copy ranges of files to their addresses, file by file in ascending order."""
    pieces = [driver.pinned(piece) for _ in range(2)]
    copied: list[Event | None] = [None, None]
    turns = cycle(range(2))
    data: dict[Path, Array] = {}
    files = {path: number for number, path in enumerate(dict.fromkeys(key[0] for key in places))}
    for path, offset, size in sorted(places, key=lambda key: (files[key[0]], *key[1:])):
        if path not in data:
            data = {path: _mapped(path)}
        if offset < 0 or offset + size > data[path].size:
            raise Error(
                f"expected weights up to byte {offset + size} of {path}, found a file of "
                f"{data[path].size} bytes; it is not the file that was compiled"
            )
        for start in range(0, size, piece):
            part = data[path][offset + start : offset + min(start + piece, size)]
            turn = next(turns)
            if (before := copied[turn]) is not None:
                before.wait()
            pieces[turn][: part.size] = part
            stream.upload(places[path, offset, size] + start, pieces[turn][: part.size])
            copied[turn] = stream.event()
    stream.wait("the upload of weights")


def _mapped(path: Path) -> Array:
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise Error(
            f"cannot read the weight file {path}: {error.strerror or error}; put it back, or "
            "compile again (with --bundle the artifact keeps a copy of its own)"
        ) from None
