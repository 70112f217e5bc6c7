"""`Observed`: what is remembered of an observed value, in memory that does not grow with the data.

The histogram counts |x| in equal bins from 0 to a power of two above the largest |x|. A larger
value doubles the range until it fits, which adds neighbouring bins, so the counts are those of all
data at once, whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

BINS = 4096
_LOWEST = -64  # the exponent of the first range of a histogram
GRAM_BLOCK = 1024  # rows of a gram matrix that are computed together
_PIECE = 1 << 20  # elements that are counted together


def exponent_above(largest: float) -> int:
    """The exponent of the range of a histogram: the next power of two above the largest |x|."""
    return max(int(np.frexp(np.float32(largest))[1]), _LOWEST)


class Observed:
    """Extremes, means and a histogram of rows of K numbers, and their gram matrix if asked for.

    Below the diagonal, `products` is not complete.
    """

    def __init__(self, width: int, gram: bool = False) -> None:
        self.rows = 0
        self.range = np.zeros(2)
        self.largest = np.zeros(width, np.float32)
        self.total = np.zeros(width)
        self.exponent = _LOWEST
        self.counts = np.zeros(BINS, np.int64)
        self.products = np.zeros((width, width), np.float32) if gram else None

    def add(self, values: Array) -> None:
        """Add rows of finite numbers [..., K]."""
        rows = np.asarray(values, np.float32).reshape(-1, self.largest.size)
        step = max(1, _PIECE // self.largest.size)
        for begin in range(0, len(rows), step):
            self._add(rows[begin : begin + step])
        if self.products is not None:
            for begin in range(0, rows.shape[1], GRAM_BLOCK):
                end = begin + GRAM_BLOCK
                self.products[begin:end, begin:] += rows[:, begin:end].T @ rows[:, begin:]
        self.rows += len(rows)

    def _add(self, rows: Array) -> None:
        sizes = np.abs(rows)
        np.maximum(self.largest, sizes.max(axis=0), out=self.largest)
        self.total += sizes.sum(axis=0, dtype=np.float64)
        self.range = np.array([min(self.range[0], rows.min()), max(self.range[1], rows.max())])
        self._grow(exponent_above(self.largest.max()))
        scale = np.float32(2.0 ** (BINS.bit_length() - 1 - self.exponent))
        places = (sizes * scale).astype(np.int64)
        self.counts += np.bincount(places.ravel(), minlength=BINS)

    def _grow(self, exponent: int) -> None:
        """Let the histogram reach to 2 ** exponent at least."""
        if exponent <= self.exponent:
            return
        joined = min(1 << (exponent - self.exponent), BINS)
        counts = self.counts.reshape(-1, joined).sum(axis=1)
        self.counts = np.pad(counts, (0, BINS - counts.size))
        self.exponent = exponent

    def state(self) -> dict[str, Array]:
        """Everything, as arrays; `restore` reads them."""
        found = {
            "numbers": np.array([self.rows, self.exponent], np.int64),
            "range": self.range,
            "largest": self.largest,
            "total": self.total,
            "histogram": self.counts,
        }
        return found if self.products is None else {**found, "products": self.products}

    @classmethod
    def restored(cls, state: Mapping[str, Array]) -> Observed:
        """The object whose `state` this is."""
        self = cls(state["largest"].size)
        self.rows, self.exponent = map(int, state["numbers"])
        self.range, self.largest = state["range"], state["largest"]
        self.total, self.counts = state["total"], state["histogram"]
        self.products = state.get("products")
        return self


def summaries(width: int, gram: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By name, dtype and shape of what a calibration folder holds of a value with so many channels.

    See irc/quantization/statistics.py.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "largest": ("f32", (width,)),
        "mean": ("f32", (width,)),
        "range": ("f32", (2,)),
        "histogram": ("i64", (BINS,)),
    }
    return {**found, "gram": ("f32", (width, width))} if gram else found


def summarized(state: Callable[[str], Array], what: str) -> Array:
    """One of the `summaries` of the object whose `state` this is, by key."""
    if what in ("largest", "histogram"):
        return state(what)
    if what == "range":
        return state(what).astype(np.float32)
    rows = np.float32(max(int(state("numbers")[0]), 1))
    if what == "mean":
        return (state("total") / rows).astype(np.float32)
    return _mirrored(state("products") / rows)


def _mirrored(matrix: Array) -> Array:
    """The matrix, with what is above the diagonal below it too."""
    for begin in range(0, len(matrix), GRAM_BLOCK):
        end = begin + GRAM_BLOCK
        block = np.triu(matrix[begin:end, begin:end])
        matrix[begin:end, begin:end] = block + np.triu(block, 1).T
        matrix[end:, begin:end] = matrix[begin:end, end:].T
    return matrix
