"""Tiles of a tensor in blocks: regions that fit the cache, of whole blocks or inside of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product as combinations
from math import prod
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Place: TypeAlias = tuple[slice, ...]
TILE = 1 << 17  # elements; half a megabyte in f32, so that several arrays fit a core's cache


def tiles(shape: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[tuple[Place, Place]]:
    """(a region of a tensor, its region of the grid of blocks), of about `limit` elements.

    `sizes` is the size of a block per dimension. The regions cover the tensor in row-major order.
    """
    if not shape:
        yield (), ()
        return
    cut = next((i for i in range(len(shape)) if prod(shape[i + 1 :]) <= limit), len(shape) - 1)
    step = max(1, limit // max(1, prod(shape[cut + 1 :])))
    inner = [(0, size) for size in shape[cut + 1 :]]
    for outer in combinations(*map(range, shape[:cut])):
        for here in _ranges(shape[cut], sizes[cut], step):
            ranges = [*((i, i + 1) for i in outer), here, *inner]
            yield (
                tuple(slice(*part) for part in ranges),
                tuple(_blocks(*part, size) for part, size in zip(ranges, sizes, strict=True)),
            )


def apart(values: Array, grid: Sequence[int]) -> Array:
    """Every dimension as two, [blocks, size of a block]: a tensor of a grid of as many blocks."""
    shape: list[int] = []
    for size, count in zip(values.shape, grid, strict=True):
        shape += [count, size // max(1, count)]
    return values.reshape(shape)


def _ranges(size: int, block: int, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of about `step` indices: whole blocks, or parts of one block."""
    if step >= block:
        step = step // block * block
        block = size
    for first in range(0, size, block or 1):
        last = min(first + block, size)
        for begin in range(first, last, step):
            yield begin, min(begin + step, last)


def _blocks(begin: int, end: int, size: int) -> slice:
    return slice(begin // size, -(-end // size))
