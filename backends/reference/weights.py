"""Where the executor gets weights: arrays given by name, else the module's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from irc.checkpoint import Reader
from irc.core import Module, Weight
from irc.dtypes import dtype_of
from irc.errors import Error, did_you_mean
from irc.weights import UnboundRef

Given: TypeAlias = Mapping[str, "np.ndarray | Sequence[np.ndarray]"]


class Weights:
    """The arrays of a module's weights per rank, each read once and kept.

    `given` maps a weight's name to its array, or to one array per rank; the rest is read from
    checkpoint files, whose relative paths start at `base`.
    """

    def __init__(self, module: Module, base: Path | str | None = None, given: Given | None = None):
        self.module, self.given = module, dict(given or {})
        self.reader = Reader(module, base if base is not None else ".")
        self.known: dict[tuple[str, int], np.ndarray] = {}
        for name in self.given:
            if name not in module.weights:
                raise Error(f"the module has no weight @{name}{did_you_mean(name, module.weights)}")

    def get(self, weight: Weight, rank: int) -> np.ndarray:
        """The array of one weight on one rank, in the weight's dtype and shape."""
        key = (weight.name, rank)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._checked(weight, self._load(weight, rank))
        return found

    def _load(self, weight: Weight, rank: int) -> np.ndarray:
        given = self.given.get(weight.name)
        if given is not None:
            return np.asarray(given) if isinstance(given, np.ndarray) else np.asarray(given[rank])
        if any(isinstance(source, UnboundRef) for source in weight.ref.sources()):
            raise Error(
                f"weight @{weight.name} has no data: "
                "give --checkpoint DIR, or --random-weights SEED"
            )
        return self.reader.read(weight, rank)

    def _checked(self, weight: Weight, array: np.ndarray) -> np.ndarray:
        if array.shape != weight.type.shape or dtype_of(array) != weight.type.dtype:
            shape = ", ".join(map(str, array.shape))
            raise Error(
                f"weight @{weight.name} is {weight.type}, but its data is "
                f"{dtype_of(array)}[{shape}]"
            )
        return array
