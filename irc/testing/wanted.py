"""The results of a module, and whether others are equal to them up to rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..backends.reference import evaluate, evaluate_ranks
from ..backends.reference.weights import Weights
from ..ir.core import Module
from ..ir.dtypes import dtype_of, is_float
from ..ir.layouts import split_array
from ..pipeline.instruments.numerics import SHORT, TOLERANCES

Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = Mapping[str, Array]
LEAST = 1e-3  # where larger numbers cancel, their rounding is left


@dataclass(frozen=True)
class Wanted:
    """The results of a module without a mesh, and how far others may be from each of them."""

    results: Arrays
    limits: Mapping[str, float]

    @classmethod
    def of(cls, module: Module, inputs: Arrays, tolerance: float) -> Wanted:
        """By the reference; others may be off by ten times what noise in the inputs changes, and by
        `tolerance`, or the rounding of 16 bits, of the largest number of each result."""
        rng, noisy, limits = np.random.default_rng(1), dict[str, Array](), dict[str, float]()
        for name, x in inputs.items():
            factor = 1 + tolerance / 10 * rng.uniform(-1, 1, x.shape)
            noisy[name] = (wide(x) * factor).astype(x.dtype) if is_float(dtype_of(x)) else x
        results = evaluate(module, inputs)
        for name, other in evaluate(module, noisy).items():
            a, b, dtype = wide(results[name]), wide(other), dtype_of(results[name])
            with np.errstate(invalid="ignore", over="ignore"):
                change = np.where(np.isfinite(a), np.abs(a - b), 0)
            largest = np.max(np.abs(a[np.isfinite(a)]), initial=LEAST)
            rounding = max(tolerance, TOLERANCES[dtype] if dtype in SHORT else 0)
            limits[name] = float(10 * np.max(change, initial=0) + rounding * largest)
        return cls(results, limits)

    @property
    def stable(self) -> bool:
        """Whether noise leaves numbers numbers."""
        return all(map(np.isfinite, self.limits.values()))

    @property
    def finite(self) -> bool:
        """Whether there is a finite number."""
        return any(np.isfinite(wide(array)).any() for array in self.results.values())

    def check(self, name: str, got: Array, mine: Array, what: str) -> None:
        """Raise unless an array, or a rank's shard of one, is the wanted one."""
        what = f"{what}: {name}"
        assert got.shape == mine.shape, f"{what} has the shape {got.shape}, not {mine.shape}"
        if mine.dtype.kind in "iub":
            assert np.array_equal(got, mine), f"{what} is\n{got}, not\n{mine}"
            return
        a, b = wide(got), wide(mine)
        finite = np.isfinite(b)
        same = np.array_equal(a[~finite], b[~finite], equal_nan=True)
        assert same and np.isfinite(a[finite]).all(), f"{what} is\n{got}, not\n{mine}"
        worst, limit = float(np.max(np.abs(a[finite] - b[finite]), initial=0)), self.limits[name]
        assert worst <= limit, f"{what} is off by {worst}, allowed is {limit}"

    def check_all(self, got: Arrays, what: str) -> None:
        """Raise unless all results are the wanted ones."""
        assert got.keys() == self.results.keys(), f"{what}: other results"
        for name, array in self.results.items():
            self.check(name, got[name], array, what)

    def check_module(self, module: Module, inputs: Arrays, what: str) -> None:
        """Raise unless the module gives the wanted results, on every rank of a local one."""
        if not module.local:
            self.check_all(evaluate(module, inputs), what)
            return
        main = module.main
        ranks = evaluate_ranks(module, inputs, weights=Weights(module))
        for name, value in zip(main.result_names(), main.returned, strict=True):
            array, axes = self.results[name], value.type.global_type.axes
            for number, rank in enumerate(ranks):
                true = split_array(np.ones(array.shape, np.bool_), axes, module.mesh, number)
                mine, got = split_array(array, axes, module.mesh, number), rank[name]
                where = f"{what} on rank {number}"
                assert got.shape == mine.shape, f"{where}: {name} has the shape {got.shape}"
                self.check(name, got[true], mine[true], where)


def wide(x: Array) -> Array:
    """Floats in f64."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)
