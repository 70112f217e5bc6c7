"""Statistics of values at sites, counted batch by batch and read from a calibration folder.

`calibration.json` has the `Facts`; its presence means that the calibration is complete. For every
observed value NAME, a safetensors file has the tensors NAME/rows, NAME/largest and so on, see
`RunningStatistics`. Sites are called by their `key`; those with the same input share the value of
one. A cache has the name of its argument.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from ml_dtypes import finfo

from ..artifact.atomic import whole_file
from ..errors import Error, did_you_mean
from ..ir.dtypes import dtype as dtype_called
from ..ir.dtypes import numpy_dtype
from ..schema import read_json
from ..weights.safetensors import Tensors

Array: TypeAlias = np.ndarray[Any, Any]

FACTS = "calibration.json"


@dataclass(frozen=True)
class Facts:
    """How a folder was made. `sites`: the name under which the values of a site are stored.

    `key` is a checksum of the module, the data and the options. `gram`: of all sites. `tokens` are
    rows for models without tokens.
    """

    model: str = ""
    tokens: int = 0
    batches: int = 0
    key: str = ""
    gram: bool = False
    files: list[str] = field(default_factory=list[str])
    sites: dict[str, str] = field(default_factory=dict[str, str])

    def write(self, folder: Path) -> None:
        """Write the file that makes a calibration folder complete."""
        with whole_file(folder / FACTS) as file:
            file.write(json.dumps(asdict(self), indent=1).encode())


def is_calibrated(folder: Path) -> bool:
    """Whether a folder holds a complete calibration."""
    return (folder / FACTS).is_file()


class Statistics:
    """The statistics in a calibration folder; arrays are read when they are asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not is_calibrated(self.folder):
            raise Error(
                f"{folder} holds no complete calibration (it has no {FACTS}); make one with "
                "irc calibrate SRC --data DATA -o FOLDER"
            )
        self.facts = read_json(self.folder / FACTS, Facts)

    @cached_property
    def _files(self) -> dict[str, Tensors]:
        """The file of each tensor."""
        every = [Tensors(self.folder / name) for name in self.facts.files]
        return {key: tensors for tensors in every for key in tensors}

    def check_width(self, site: str, width: object) -> None:
        """An Error unless the values of a site have so many channels."""
        channels = self.largest(site).size
        if channels != width:
            raise Error(
                f"{self.folder} has statistics of {channels} channels of {site}, not {width}; "
                f"{self._other_model()}"
            )

    def sites(self) -> list[str]:
        """The names of all sites and caches."""
        return list(self.facts.sites)

    def has_gram(self, *sites: str) -> bool:
        """Whether there are gram matrices of all sites."""
        return all(self._key(site, "products") in self._files for site in sites)

    def largest(self, site: str) -> Array:
        """max |x| per channel, f32 [K]."""
        return self._array(site, "largest")

    def mean(self, site: str) -> Array:
        """mean |x| per channel, f32 [K]."""
        rows = max(int(self._array(site, "rows")[0]), 1)
        return (self._array(site, "total") / rows).astype(np.float32)

    def gram(self, *sites: str) -> Array:
        """The mean of x xᵀ over all tokens, f32 [K, K]; an Error where it was not asked for."""
        if not self.has_gram(*sites):
            raise Error(f"{self.folder} has no gram matrix of {sites[0]}; calibrate with --gram")
        sums = {what: [self._array(s, what) for s in sites] for what in ("products", "rows")}
        return gram_of({what: sum(arrays[1:], arrays[0]) for what, arrays in sums.items()})

    def histogram(self, site: str) -> Histogram:
        """The histogram of |x|."""
        counts, largest = self._array(site, "histogram"), float(self.largest(site).max())
        return Histogram(counts, 2.0 ** exponent_above(largest) / counts.size, largest)

    def scale_range(self, site: str, observer: str = "", dtype: str = "i8") -> float:
        """The largest |x| to represent: the scale is that over the largest number of `dtype`.

        Observers: "min-max", "percentile", "percentile:99.9", "entropy" and "mse"; by default "mse"
        for integers and "min-max" for floats.
        """
        return chosen_range(self.histogram(site), observer, dtype)

    def _other_model(self) -> str:
        return f"it was made from another model, {self.facts.model}: calibrate this one"

    def _key(self, site: str, what: str) -> str:
        stored = self.facts.sites.get(site)
        if stored is None:
            near = did_you_mean(site, self.facts.sites)
            raise Error(f"{self.folder} has no statistics of {site}{near}; {self._other_model()}")
        return f"{stored}/{what}"

    def _array(self, site: str, what: str) -> Array:
        key = self._key(site, what)
        array = self._files[key][key] if key in self._files else np.zeros(0)
        if not array.size or not np.isfinite(array).all():
            raise Error(f"{self.folder}: {key} is empty or has NaN or infinity; calibrate again")
        return array


# -- what is counted


BINS = 4096
GRAM_BLOCK = 1024  # rows of a gram matrix that are computed together
_LOWEST = -64  # the exponent of the first range of a histogram
_PIECE = 1 << 20  # elements that are counted together


def exponent_above(largest: float) -> int:
    """The exponent of the range of a histogram: the next power of two above the largest |x|."""
    exponent = int(np.frexp(np.float32(largest))[1])
    return max(exponent, _LOWEST) if largest else _LOWEST


class RunningStatistics:
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


# -- ranges of static scales


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
