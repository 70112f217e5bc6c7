"""Comparison of the median row, where inputs of products are rounded to codes.

Two orders of a sum differ in the last bits, and where a number is that near to the boundary of two
codes, one evaluation takes the next code: results of its row are then off by up to a tenth. With
the models here that happens to 1 row of 100, and at most to 12; the others agree to a millionth.
A fault changes most rows. So the error is that of the median row, with a limit as for sums in f32.
"""

from __future__ import annotations

import numpy as np

ROWS = 21  # of which 11 are off by chance once in 100,000 times at most


def row_error(found: np.ndarray, wanted: np.ndarray, rounded: bool = True) -> float:
    """The largest error of a row relative to its largest number: of the median of ROWS rows, which
    share no input; of the worst row where no input is `rounded`."""
    assert found.shape == wanted.shape and (len(wanted) >= ROWS or not rounded)
    rest = tuple(range(1, wanted.ndim))
    errors = np.abs(found - wanted).max(rest) / np.abs(wanted).max(rest)
    return float(np.median(errors) if rounded else errors.max())
