"""The executor's weights: arrays by name, else read from the module's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from irc.errors import Error, did_you_mean
from irc.ir.core import Module, Weight
from irc.ir.dtypes import dtype_of
from irc.weights.checkpoint import Reader

Arrays: TypeAlias = Mapping[str, "np.ndarray | Sequence[np.ndarray]"]


class Weights:
    """The arrays of a module's weights per rank, each read once.

    `arrays` maps a weight's name to its array, or to an array per rank; the other weights are read
    from checkpoint files, whose relative paths start at `base`.
    """

    def __init__(
        self, module: Module, base: Path | str | None = None, arrays: Arrays | None = None
    ):
        self.module, self.arrays = module, dict(arrays or {})
        self.reader = Reader(module, base if base is not None else ".")
        self.known: dict[tuple[str, int], np.ndarray] = {}
        for name in self.arrays:
            if name not in module.weights:
                raise Error(f"the module has no weight @{name}{did_you_mean(name, module.weights)}")

    def get(self, weight: Weight, rank: int) -> np.ndarray:
        """The array of one weight on one rank, in the weight's dtype and shape."""
        key = (weight.name, rank)
        array = self.known.get(key)
        if array is None:
            array = self.known[key] = self._checked(weight, self._load(weight, rank))
        return array

    def _load(self, weight: Weight, rank: int) -> np.ndarray:
        own = self.arrays.get(weight.name)
        if own is not None:
            return np.asarray(own if isinstance(own, np.ndarray) else own[rank])
        return self.reader.read(weight, rank)

    def _checked(self, weight: Weight, array: np.ndarray) -> np.ndarray:
        if array.shape != weight.type.shape or dtype_of(array) != weight.type.dtype:
            stored = f"{dtype_of(array)}{list(array.shape)}"
            raise Error(f"weight @{weight.name} is {weight.type}, but its data is {stored}")
        return array
