"""`Statistics`: reads a calibration folder, which holds statistics of the inputs of linears.

    statistics.safetensors   per observed value NAME, with K channels
      NAME/largest f32[K]    max |x| per channel
      NAME/mean f32[K]       mean |x| per channel
      NAME/range f32[2]      the least and the largest x
      NAME/histogram i64[N]  counts of |x| in N equal bins from 0 to the next power of two above max
      NAME/gram f32[K, K]    the mean of x xᵀ over all rows, if it was asked for
    calibration.json         Facts; its presence means that the calibration is complete

Sites with the same input share the statistics of one of them. A cache has the name of its argument.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..artifact.atomic import whole_file
from ..errors import Error, did_you_mean
from ..schema import read_json
from .observed import exponent_above
from .ranges import Histogram, chosen_range
from .tensors import Tensors

Array: TypeAlias = np.ndarray[Any, Any]

STATISTICS, FACTS = "statistics.safetensors", "calibration.json"


@dataclass(frozen=True)
class Facts:
    """How a folder was made. `sites`: the name under which the values of a site are stored.

    `key` is a checksum of the module, the data and the options. `gram`: of all sites.
    """

    model: str = ""
    tokens: int = 0
    batches: int = 0
    key: str = ""
    gram: bool = False
    sites: dict[str, str] = field(default_factory=dict[str, str])


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
    def _tensors(self) -> Tensors:
        return Tensors(self.folder / STATISTICS)

    @property
    def tokens(self) -> int:
        """The number of tokens (for other models: rows) of the data."""
        return self.facts.tokens

    def sites(self) -> list[str]:
        """The names of all sites and caches."""
        return list(self.facts.sites)

    def has_gram(self, site: str) -> bool:
        """Whether there is a gram matrix of a site."""
        return f"{self._stored(site)}/gram" in self._tensors

    def largest(self, site: str) -> Array:
        """max |x| per channel, f32 [K]."""
        return self._array(site, "largest")

    def mean(self, site: str) -> Array:
        """mean |x| per channel, f32 [K]."""
        return self._array(site, "mean")

    def gram(self, site: str) -> Array:
        """The mean of x xᵀ over all tokens, f32 [K, K]; an Error where it was not asked for."""
        return self._array(site, "gram")

    def range(self, site: str) -> tuple[float, float]:
        """The least and the largest x."""
        low, high = self._array(site, "range").tolist()
        return low, high

    def histogram(self, site: str) -> Histogram:
        """The histogram of |x|."""
        counts, largest = self._array(site, "histogram"), float(self.largest(site).max())
        return Histogram(counts, 2.0 ** exponent_above(largest) / counts.size, largest)

    def scale_range(self, site: str, observer: str = "min-max", dtype: str = "i8") -> float:
        """The largest |x| to represent: the scale is that over the largest number of `dtype`.

        Observers: "min-max", "percentile", "percentile:99.9", "entropy" and "mse".
        """
        return chosen_range(self.histogram(site), observer, dtype)

    def _stored(self, site: str) -> str:
        stored = self.facts.sites.get(site)
        if stored is None:
            near = did_you_mean(site, self.facts.sites)
            raise Error(
                f"{self.folder} has no statistics of {site}{near}; it was made from another model, "
                f"{self.facts.model}: calibrate this one"
            )
        return stored

    def _array(self, site: str, what: str) -> Array:
        key = f"{self._stored(site)}/{what}"
        if key not in self._tensors:
            hint = "; calibrate with --gram" if what == "gram" else "; calibrate again"
            raise Error(f"{self.folder} has no {what} of {site}{hint}")
        array = self._tensors[key]
        if not array.size or not np.isfinite(array).all():
            raise Error(f"{self.folder}: {key} is empty or has NaN or infinity; calibrate again")
        return array


def is_calibrated(folder: Path) -> bool:
    """Whether a folder holds a complete calibration."""
    return (folder / FACTS).is_file()


def write_facts(folder: Path, facts: Facts) -> None:
    """Write the file that makes a calibration folder complete."""
    with whole_file(folder / FACTS) as file:
        file.write(json.dumps(asdict(facts), indent=1).encode())
