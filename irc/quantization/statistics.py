"""`Statistics`: reads a calibration folder, which holds statistics of the inputs of linears.

`calibration.json` has the `Facts`; its presence means that the calibration is complete. For every
observed value NAME, a safetensors file has the tensors NAME/rows, NAME/largest and so on, see
`Observed`. Sites are called by their `key`; those with the same input share the value of one. A
cache has the name of its argument.
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
from .observed import exponent_above, gram_of
from .ranges import Histogram, chosen_range
from .tensors import Tensors

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
        found = self.largest(site).size
        if found != width:
            raise Error(
                f"{self.folder} has statistics of {found} channels of {site}, not {width}; "
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
