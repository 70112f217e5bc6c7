"""Puts weights on the GPU straight from the mapped checkpoint, each stretch of bytes once.

Bytes go through two pieces of page-locked memory: while the GPU copies one, the next is read into
the other.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from irc.backends.tensorrt.runtime.driver import Array, Driver, Event, Stream, Tensor
from irc.backends.tensorrt.runtime.plan import Binding
from irc.errors import Error

PIECE = 32 << 20  # bytes of one piece of page-locked memory
ALIGNMENT = 256
_Key: TypeAlias = tuple[Path, int, int]


class Weights:
    """The weights of one rank in the memory of its GPU: `addresses` by the engine's inputs."""

    def __init__(
        self, driver: Driver, stream: Stream, bindings: Sequence[Binding], piece: int = PIECE
    ) -> None:
        self._driver = driver
        places: dict[_Key, int] = {}
        end = 0
        for each in bindings:
            key = (each.path, each.offset, each.size)
            if key not in places:
                places[key] = end
                end += -(-each.size // ALIGNMENT) * ALIGNMENT
        self.bytes = end
        self._memory = _room(driver, end) if end else 0
        self.addresses = {
            each.name: self._memory + places[each.path, each.offset, each.size] for each in bindings
        }
        if end:
            _Upload(driver, stream, piece).all({k: self._memory + at for k, at in places.items()})

    def free(self) -> None:
        """Give the memory back."""
        if self._memory:
            self._driver.free(self._memory)
            self._memory = 0


def _room(driver: Driver, size: int) -> int:
    free = driver.free_memory()
    if size > free:
        raise Error(
            f"the weights of this rank take {size / 1e9:.2f} GB, and {driver.gpu.name} has "
            f"{free / 1e9:.2f} of {driver.gpu.memory / 1e9:.2f} GB free; compile for more ranks "
            "(--mesh tp=N), or end what else uses the GPU"
        )
    return driver.allocate(size)


class _Upload:
    def __init__(self, driver: Driver, stream: Stream, piece: int) -> None:
        self._stream = stream
        self._pieces = [driver.pinned(piece) for _ in range(2)]
        self._copied: list[Event | None] = [None, None]
        self._turn = 0

    def all(self, places: Mapping[_Key, int]) -> None:
        """Copy stretches of files to their addresses, a file at a time in its own order."""
        files: dict[Path, list[tuple[int, int, int]]] = {}
        for (path, offset, size), address in places.items():
            files.setdefault(path, []).append((offset, size, address))
        for path, stretches in files.items():
            data = _mapped(path)
            for offset, size, address in sorted(stretches):
                if offset < 0 or offset + size > data.size:
                    raise Error(
                        f"{path} has {data.size} bytes, and the weights lie in it up to "
                        f"{offset + size}; it is not the file that was compiled"
                    )
                self._stretch(data[offset : offset + size], address)
        self._stream.wait()

    def _stretch(self, data: Array, address: int) -> None:
        room = self._pieces[0].size
        for start in range(0, data.size, room):
            part = data[start : start + room]
            turn = self._turn
            self._turn = 1 - turn
            before = self._copied[turn]
            if before is not None:
                before.wait()
            piece = self._pieces[turn][: part.size]
            piece[...] = part
            self._stream.upload(address + start, piece)
            self._copied[turn] = self._stream.event()


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


def check_bindings(bindings: Sequence[Binding], tensors: Mapping[str, Tensor]) -> None:
    """An Error where the engine does not take the weights that are to be bound to it."""
    for each in bindings:
        tensor = tensors.get(each.name)
        if tensor is None or tensor.output:
            raise Error(
                f"the engine has no input {each.name}, which a weight is to be bound to; the "
                "engine and the bindings are of different compilations; compile again"
            )
        if (tensor.dtype, tensor.shape) != (each.dtype, each.shape):
            raise Error(
                f"the engine's input {each.name} is {tensor.dtype}{list(tensor.shape)}, and the "
                f"weight bound to it is {each.dtype}{list(each.shape)}; compile again"
            )
