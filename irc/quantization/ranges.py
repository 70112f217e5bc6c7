"""Observers: the largest |x| that a static scale represents, from a histogram of |x|."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from ml_dtypes import finfo

from ..errors import Error, did_you_mean
from ..ir.dtypes import dtype as dtype_called
from ..ir.dtypes import numpy_dtype

Array: TypeAlias = np.ndarray[Any, Any]

OBSERVERS = ("min-max", "percentile", "entropy", "mse")
PERCENTILE = 99.99
_FIRST, _STEP = 128, 32  # the bins of the smallest range that is tried, and between two
_POINTS = 4  # numbers that stand for the values in a bin


@dataclass(frozen=True)
class Histogram:
    """Counts of |x| in equal bins of `width` from 0; `largest` is the largest |x|."""

    counts: Array
    width: float
    largest: float


def check_observer(observer: str) -> float:
    """The percentile of an observer, `PERCENTILE` where it has none; an Error for unknown ones."""
    if not observer:
        return PERCENTILE
    name, colon, number = observer.partition(":")
    if name not in OBSERVERS or (colon and name != "percentile"):
        hint = did_you_mean(name, OBSERVERS)
        raise Error(
            f"no observer called {observer!r}{hint}; there are min-max, percentile, "
            "percentile:99.9, entropy and mse"
        )
    try:
        percent = float(number) if colon else PERCENTILE
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise Error(f"{observer}: expected a percentage above 0 and up to 100, as percentile:99.9")
    return percent


def chosen_range(histogram: Histogram, observer: str, dtype: str) -> float:
    """The largest |x| that codes of `dtype` (i8, f8e4m3, ...) shall represent; 1 if all are 0.

    min-max: the largest |x|. percentile: as many percent of |x| are at most that. mse: the least
    mean square error. entropy: the least Kullback-Leibler divergence of the distribution of codes
    from that of |x|, as TensorRT does (Migacz, 8-bit Inference with TensorRT, GTC 2017). Without an
    observer: mse for integers, min-max for floats, whose steps are small near 0 in any range.
    """
    percent = check_observer(observer)
    if not histogram.largest:
        return 1.0
    default = "min-max" if dtype_called(dtype).is_float else "mse"
    name = observer.partition(":")[0] or default
    if name == "min-max":
        return histogram.largest
    if name == "percentile":
        bins = _percentile(histogram.counts, percent)
    else:
        bins = _least(histogram.counts, _divergence if name == "entropy" else _error, dtype)
    return min(bins * histogram.width, histogram.largest)


def _percentile(counts: Array, percent: float) -> int:
    enough: Array = np.cumsum(counts) >= counts.sum() * (percent / 100)
    return int(enough.argmax()) + 1


def _least(counts: Array, loss: Callable[[Array, int, str], float], dtype: str) -> int:
    """The number of bins whose range has the least loss; the largest of several."""
    filled: Array = counts[::-1] > 0
    used = counts.size - int(filled.argmax())
    tried = [used, *reversed(range(_FIRST, used, _STEP))]
    return min(tried, key=lambda bins: loss(counts[:used], bins, dtype))


def _rounded(values: Array, limit: float, dtype: str) -> Array:
    """Numbers of at least 0 after quantization with the range `limit`, and dequantization."""
    kind: Any = numpy_dtype(dtype)
    if kind.kind in "iu":
        top = float(np.iinfo(kind).max)
        return np.rint(np.minimum(values / limit * top, top)) * (limit / top)
    top = float(cast("Any", finfo)(kind).max)
    codes = np.minimum(values / limit * top, top).astype(kind)
    return codes.astype(np.float64) * (limit / top)


def _error(counts: Array, bins: int, dtype: str) -> float:
    """The sum of square errors in units of the bins' width."""
    values = (np.arange(counts.size * _POINTS) + 0.5) / _POINTS
    errors = (values - _rounded(values, float(bins), dtype)) ** 2
    return float(errors.reshape(-1, _POINTS).sum(axis=1) @ counts)


def _divergence(counts: Array, bins: int, dtype: str) -> float:
    """The divergence of quantized |x| from |x|, both as distributions over the bins in range.

    What lies beyond the range counts at its end. Zeros count as the bin above them, so that a peak
    of exact zeros, which every scale represents, decides nothing.
    """
    inside = counts[:bins].astype(np.float64)
    inside[0] = inside[1]
    wanted = inside.copy()
    wanted[-1] += counts[bins:].sum()
    codes = _rounded(np.arange(bins) + 0.5, float(bins), dtype)
    starts = np.flatnonzero(np.diff(codes, prepend=-1.0))
    filled = (inside > 0).astype(np.float64)
    sums, places = np.add.reduceat(inside, starts), np.add.reduceat(filled, starts)
    sizes = np.diff(starts, append=bins)
    spread = np.repeat(sums / np.maximum(places, 1), sizes) * filled
    if not wanted.sum() or not spread.sum():
        return float("inf")
    return _kl(wanted / wanted.sum(), spread / spread.sum())


def _kl(p: Array, q: Array) -> float:
    least = 1e-12  # for a bin that p has and q lacks
    used = p > 0
    return float((p[used] * np.log(p[used] / np.maximum(q[used], least))).sum())
