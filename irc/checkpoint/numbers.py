"""Seeded random numbers of weights without a checkpoint, made a block of rows at a time."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from math import prod

import numpy as np

from ..weights import RandomRef
from .files import Array

ROWS = 64  # rows that share one generator, so that a slice of rows costs its own blocks


class Numbers:
    """Regions of random references. The last `limit` bytes of blocks are kept for other ranks."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._kept: OrderedDict[tuple[RandomRef, int], Array] = OrderedDict()

    def region(self, ref: RandomRef, picks: Sequence[range]) -> Array:
        """Normal numbers of f32 times the scale, at indices of every dimension of its shape."""
        if not picks:
            return self._block(ref, 0).reshape(())
        out = np.empty([len(part) for part in picks], np.float32)
        rows, rest = picks[0], tuple(slice(p.start, p.stop, p.step) for p in picks[1:])
        at = 0
        while at < len(rows):
            block = rows[at] // ROWS
            last = min(len(rows), at - -((block + 1) * ROWS - rows[at]) // rows.step)
            chosen = slice(rows[at] - block * ROWS, rows[last - 1] - block * ROWS + 1, rows.step)
            out[at:last] = self._block(ref, block)[(chosen, *rest)]
            at = last
        return out

    def _block(self, ref: RandomRef, block: int) -> Array:
        found = self._kept.pop((ref, block), None)
        if found is None:
            found = _drawn(ref, block)
            self._held += found.nbytes
        self._kept[ref, block] = found
        while self._held > self._limit and len(self._kept) > 1:
            self._held -= self._kept.popitem(last=False)[1].nbytes
        return found


def _drawn(ref: RandomRef, block: int) -> Array:
    """Block i of rows has a Philox generator of its own, keyed by the seed and the name."""
    digest = hashlib.sha256(f"{ref.seed}:{ref.key}".encode()).digest()
    key = int.from_bytes(digest[:16], "little")
    shape = ref.shape or (1,)
    count = min(ROWS, shape[0] - block * ROWS)
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, block, 0]))
    values = generator.standard_normal((count, prod(shape[1:])), np.float32)
    return (values * np.float32(ref.scale)).reshape(count, *shape[1:])
