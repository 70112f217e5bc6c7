"""`CheckNumerics`: compares the results of a module before and after every pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...analysis.sizes import LocalSizes
from ...errors import Error
from ...ir.core import Module
from ...ir.dtypes import dtype, dtype_of, is_float
from ..run import Instrument, Step
from ..text import Pipeline

Array: TypeAlias = NDArray[Any]
Evaluate: TypeAlias = Callable[[Module, Mapping[str, Array]], Mapping[str, Array]]

# Sizes of the usual symbols: distinct, with a cache capacity beyond the tokens.
_SMALL = {"B": 2, "S": 3, "T": 2, "C": 8}
_OTHER = 4


class CheckNumerics(Instrument):
    """Evaluates the module before the first pass and after each, and compares all results.

    `evaluate(module, inputs)` returns the results by name, as the reference backend does. `sizes`
    are the values of symbolic dims; `inputs` replace random ones. Results may differ by
    `tolerance`, relative to the largest number of the result; the default is 1e-4, or 2e-2 if a
    weight or an argument is a 16-bit float. The Error names the pass and the result.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        sizes: Mapping[str, int] | None = None,
        inputs: Mapping[str, Array] | None = None,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> None:
        self.evaluate, self.sizes, self.chosen = evaluate, sizes, dict(inputs or {})
        self.tolerance, self.seed = tolerance, seed
        self.inputs: dict[str, Array] = {}
        self.results: dict[str, Array] = {}

    def start(self, module: Module, pipeline: Pipeline) -> None:
        sizes = small_sizes(module) | dict(self.sizes or {})
        self.inputs = random_inputs(module, sizes, self.seed) | self.chosen
        if self.tolerance is None:
            short = any(w.type.dtype in ("f16", "bf16") for w in module.weights.values())
            short |= any(a.type.dtype in ("f16", "bf16") for a in module.main.args)
            self.tolerance = 2e-2 if short else 1e-4
        self.results = dict(self.evaluate(module, self.inputs))

    def after(self, step: Step, module: Module) -> None:
        results = dict(self.evaluate(module, self.inputs))
        if list(results) != list(self.results):
            raise Error(
                f"the pass {step} changes the results from {', '.join(self.results)} "
                f"to {', '.join(results)}"
            )
        for name, before in self.results.items():
            difference = compare(before, results[name], self.tolerance or 0.0)
            if difference is not None:
                raise Error(f"the pass {step} changes the result {name}: {difference}")


def compare(before: Array, after: Array, tolerance: float) -> str | None:
    """A description of differences beyond rounding, or None.

    Integers and bools must be equal; infinities and NaN must be at equal positions.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"{before.dtype}{list(before.shape)} becomes {after.dtype}{list(after.shape)}"
    exact = not is_float(dtype_of(before))
    a, b = before, after
    if exact:
        wrong = np.asarray(a != b)
    else:
        a, b = before.astype(np.float64), after.astype(np.float64)
        scale = np.abs(a[np.isfinite(a)]).max(initial=0.0)
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            near = np.abs(a - b) <= tolerance * scale  # false where one is NaN or infinite
        wrong = ~(equal | near)
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    count = int(wrong.sum())
    return f"{count} of {wrong.size} elements differ, first at {list(at)}: {a[at]} becomes {b[at]}"


def small_sizes(module: Module) -> dict[str, int]:
    """A small value for every symbolic dim, within its range in the module."""
    symbols: dict[str, None] = dict.fromkeys(module.dims)
    for arg in module.main.args:
        for dim in arg.type.global_type.shape:
            if not isinstance(dim, int):
                symbols |= dict.fromkeys(dim.symbols())
    sizes: dict[str, int] = {}
    for name in symbols:
        low, _, high = module.dims.get(name, (1, 1, 1 << 30))
        sizes[name] = max(low, min(_SMALL.get(name, _OTHER), high))
    return sizes


def random_inputs(module: Module, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """Random arrays for the arguments of the main function; global ones also in the local view.

    Floats are normal; integers are 0 or 1, valid as ids, positions and lengths.
    """
    random = np.random.default_rng(seed)
    local = LocalSizes(module.mesh, sizes)
    types = {str(arg.name): arg.type.global_type for arg in module.main.args}
    arrays: dict[str, Array] = {}
    for name, type in types.items():
        kind, shape = dtype(type.dtype), tuple(map(local.dim, type.shape))
        drawn = random.standard_normal(shape) if kind.is_float else random.integers(0, 2, shape)
        arrays[name] = np.asarray(drawn).astype(kind.numpy)
    return arrays
