"""`Observed`: what is remembered of an observed value, in memory that does not grow with the data.

The histogram counts |x| in equal bins from 0 to a power of two above the largest |x|. A larger
value doubles the range until it fits, which adds neighbouring bins, so the counts are those of all
data at once, whatever the order.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

BINS = 4096
GRAM_BLOCK = 1024  # rows of a gram matrix that are computed together
_LOWEST = -64  # the exponent of the first range of a histogram
_PIECE = 1 << 20  # elements that are counted together


def exponent_above(largest: float) -> int:
    """The exponent of the range of a histogram: the next power of two above the largest |x|."""
    exponent = int(np.frexp(np.float32(largest))[1])
    return max(exponent, _LOWEST) if largest else _LOWEST


class Observed:
    """What is known of rows of K numbers, by name in `state`.

    rows i64[1]: how many; largest f32[K]: max |x| per channel; total f64[K]: the sum of |x|;
    histogram i64[BINS]; products f32[K, K], if asked for: the sum of x xᵀ, complete on and above
    the diagonal only.
    """

    def __init__(self, width: int, gram: bool = False) -> None:
        self.state: dict[str, Array] = {
            "rows": np.zeros(1, np.int64),
            "largest": np.zeros(width, np.float32),
            "total": np.zeros(width),
            "histogram": np.zeros(BINS, np.int64),
        }
        if gram:
            self.state["products"] = np.zeros((width, width), np.float32)

    def add(self, values: Array) -> None:
        """Add rows of finite numbers [..., K]."""
        width = self.state["largest"].size
        rows = np.asarray(values, np.float32).reshape(-1, width)
        step = max(1, _PIECE // width)
        for begin in range(0, len(rows), step):
            self._count(np.abs(rows[begin : begin + step]))
        for begin in range(0, width if "products" in self.state else 0, GRAM_BLOCK):
            part = rows[:, begin : begin + GRAM_BLOCK]
            self.state["products"][begin : begin + GRAM_BLOCK, begin:] += part.T @ rows[:, begin:]
        self.state["rows"] += len(rows)

    def _count(self, sizes: Array) -> None:
        state, before = self.state, exponent_above(self.state["largest"].max())
        np.maximum(state["largest"], sizes.max(axis=0), out=state["largest"])
        state["total"] += sizes.sum(axis=0, dtype=np.float64)
        exponent = exponent_above(state["largest"].max())
        joined = min(1 << max(exponent - before, 0), BINS)  # zeros before are in bin 0
        counts = state["histogram"].reshape(-1, joined).sum(axis=1)
        places = (sizes * np.float32(2.0 ** (BINS.bit_length() - 1 - exponent))).astype(np.int64)
        counts = np.pad(counts, (0, BINS - counts.size))
        state["histogram"] = counts + np.bincount(places.ravel(), minlength=BINS)


def gram_of(state: dict[str, Array]) -> Array:
    """The mean of x xᵀ, from `products` and `rows`."""
    matrix = state["products"] / np.float32(max(int(state["rows"][0]), 1))
    for begin in range(0, len(matrix), GRAM_BLOCK):
        end = begin + GRAM_BLOCK
        upper = np.triu(matrix[begin:end, begin:end])
        matrix[begin:end, begin:end] = upper + np.triu(upper, 1).T
        matrix[end:, begin:end] = matrix[begin:end, end:].T
    return matrix
