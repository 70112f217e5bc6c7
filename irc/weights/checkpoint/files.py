"""Memory-mapped weight files, and contiguous extents of them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from ...errors import Error
from ...files import open_file
from ...ir.dtypes import dtype, numpy_dtype, unpacked
from ..safetensors import Tensor, read_header

Array: TypeAlias = np.ndarray[Any, Any]
RESIDENT = 32 << 20  # bytes of a file that may stay resident while it is copied


@dataclass(frozen=True)
class Extent:
    """Contiguous bytes of a file that are the elements of a tensor."""

    path: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class File:
    """A memory-mapped file, with its safetensors header if it is a checkpoint."""

    def __init__(self, path: str, checkpoint: bool = True) -> None:
        self.path = path
        self.tensors = read_header(path) if checkpoint else {}
        self._lock = Lock()
        self._touched: dict[tuple[int, int], None] = {}
        self._count = 0  # bytes in all touched ranges
        try:
            with open_file(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            why = error.strerror if isinstance(error, OSError) else "it is empty"
            raise Error(f"cannot read the weights in {path}: {why or error}") from None
        self.size = len(self._map)

    def view(self, tensor: Tensor) -> Array:
        """The tensor as an array over the mapped bytes."""
        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return flat.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)

    def part(self, tensor: Tensor, picks: tuple[range, ...]) -> Array:
        """The elements at `picks` of every dimension: a view, or a copy if a byte holds two."""
        cuts = tuple(slice(pick.start, pick.stop, pick.step) for pick in picks)
        if dtype(tensor.dtype).bits >= 8:
            return self.view(tensor)[cuts]
        packed = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        if len(picks) == 2 and tensor.shape[1] % 2 == 0:
            return _packed_region(packed, tensor, picks)
        return _packed_rows(packed, tensor, picks)[(..., *cuts[1:])]

    def touched(self, begin: int, end: int) -> None:
        """Record that bytes were read; release the pages of all ranges beyond RESIDENT bytes.

        Not at once, since the next rank may read its shard of the same rows.
        """
        with self._lock:
            self._touched[begin, end] = None
            self._count += end - begin
            if self._count <= RESIDENT:
                return
        self.release()

    def release(self) -> None:
        """Release the pages of all touched ranges to the system."""
        with self._lock:
            touched, self._touched, self._count = self._touched, {}, 0
        for begin, end in touched if hasattr(mmap, "MADV_DONTNEED") else ():
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            if end > first:
                self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


def _packed_region(packed: Array, tensor: Tensor, picks: tuple[range, ...]) -> Array:
    """A region of a matrix whose rows begin with a byte."""
    rows, columns = picks
    begin, end = columns.start // 2, -(-columns.stop // 2)
    halves = packed.reshape(tensor.shape[0], -1)[rows.start : rows.stop : rows.step, begin:end]
    elements = unpacked(halves, tensor.dtype)
    return elements[:, columns.start - 2 * begin : columns.stop - 2 * begin : columns.step]


def _packed_rows(packed: Array, tensor: Tensor, picks: tuple[range, ...]) -> Array:
    """The elements at `picks` of the first dimension, where a row may begin within a byte."""
    rows = picks[0] if picks else range(1)
    rows = range(rows[0], rows[-1] + 1, rows.step) if rows else range(0)  # not beyond the tensor
    inner = tensor.shape[1:]
    first, last = rows.start * prod(inner), rows.stop * prod(inner)
    elements = unpacked(packed[first // 2 : -(-last // 2)], tensor.dtype)
    elements = elements[first % 2 :][: last - first].reshape(rows.stop - rows.start, *inner)
    return elements[:: rows.step] if picks else elements.reshape(())
