"""`CheckNumerics`: compares the results of a module before and after every pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...analysis.sizes import LocalSizes
from ...errors import Error
from ...ir.core import Module
from ...ir.dims import Shape, linear
from ...ir.dtypes import dtype, dtype_of, is_float
from ...text import parse_module
from ...text.printer import print_module
from ..run import Instrument, Step
from ..text import Pipeline

Array: TypeAlias = NDArray[Any]
Run: TypeAlias = Callable[[Mapping[str, Array]], Mapping[str, Array]]
Evaluate: TypeAlias = Callable[[Module, Mapping[str, Array]], Mapping[str, Array]]

# How far rounding may take numbers apart, relative to the largest of a result.
TOLERANCES = {"f64": 1e-11, "f32": 1e-4, "f16": 2e-2, "bf16": 2e-2}
SHORT = ("f16", "bf16")
# Sizes of the usual symbols: distinct, with a cache capacity beyond the tokens.
_SMALL = {"B": 2, "S": 3, "T": 2, "C": 8}
_OTHER = 4
_SAMPLED = 1 << 16  # numbers of an array whose sizes are sorted


class CheckNumerics(Instrument):
    """Evaluates the module before the first pass and after each, and compares all results.

    `evaluate(module, inputs)` returns the results by name, as the reference backend does. `sizes`
    are the values of symbolic dims; `inputs` replace random ones. Results may differ by
    `tolerance`, relative to the largest usual number of the result (see `compare`); the default is
    1e-4, or 2e-2 if a weight or an argument is a 16-bit float. The Error names the pass and the
    result.

    Where a pass makes sizes multiples of the number of shards, other inputs are drawn. States whose
    fixed sizes it makes larger, as it pads the heads of caches, are padded alike: each entry is
    repeated if that gives the results, zeros follow, and the padding of results is not compared.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        sizes: Mapping[str, int] | None = None,
        inputs: Mapping[str, Array] | None = None,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> None:
        self.evaluate, self.sizes, self.chosen = evaluate, dict(sizes or {}), dict(inputs or {})
        self.tolerance, self.seed = tolerance, seed
        self.inputs: Mapping[str, Array] = {}
        self.results: dict[str, Array] = {}

    def start(self, module: Module, pipeline: Pipeline) -> None:
        self._origin = parse_module(print_module(module))
        self._sizes = small_sizes(module) | self.sizes
        if self.tolerance is None:
            self.tolerance = max(TOLERANCES["f32"], tolerance_of(module))
        self._evaluate_origin()

    def draw(self, module: Module, sizes: Mapping[str, int]) -> Mapping[str, Array]:
        """The inputs for some sizes."""
        return random_inputs(module, sizes, self.seed) | self.chosen

    def after(self, step: Step, module: Module) -> None:
        self.fit(module)
        if difference := self.difference(module):
            raise Error(f"the pass {step} changes {difference}")

    def fit(self, module: Module) -> None:
        """Draw inputs of larger sizes where a module takes only multiples of a number; an Error
        where inputs were given."""
        new = {arg.name: arg.type.global_type for arg in module.main.args}
        needed: dict[str, int] = {}
        for arg in self._origin.main.args:
            array, type = self.inputs[str(arg.name)], new.get(arg.name, arg.type)
            for dim, now, size in zip(arg.type.shape, type.shape, array.shape, strict=False):
                old, terms = linear(dim), linear(now)
                if old and old[1:] == (1, 0) and terms and terms[2] == 0 and size % terms[1]:
                    needed[old[0]] = size + -size % terms[1]
                    if self.chosen:
                        raise Error(
                            f"{old[0]} is {size} in the input {arg.name}, but where the module is "
                            f"sharded it is a multiple of {terms[1]}; give inputs of such a size"
                        )
        if needed:
            self._sizes |= needed
            self._evaluate_origin()

    def difference(self, module: Module, run: Run | None = None) -> str:
        """The first result of a module that differs, and how, "" if none does; `run(inputs)` gives
        the results, by default `evaluate`."""
        main, differences = module.main, list[tuple[int, str]]()
        pairs = zip(main.result_names(), main.results, strict=False)
        states = {result.alias: name for name, result in pairs if result.alias in self.inputs}
        shapes = {
            str(arg.name): arg.type.global_type.shape for arg in main.args if arg.name in states
        }
        sizes = [
            pair
            for name, shape in shapes.items()
            for pair in zip(shape, self.inputs[name].shape, strict=False)
        ]
        most = max([1, *(n // size for n, size in sizes if isinstance(n, int) and size)])
        for copies in range(most, 0, -1):
            inputs = {
                name: _padded(array, shapes.get(name, ()), copies)
                for name, array in self.inputs.items()
            }
            results = self.evaluate(module, inputs) if run is None else run(inputs)
            differences.append(self._compared(results, states.values(), copies))
            if not differences[-1][1]:
                return ""
        return max(differences)[1]

    def _evaluate_origin(self) -> None:
        self.inputs = self.draw(self._origin, self._sizes)
        self.results = dict(self.evaluate(self._origin, self.inputs))

    def _compared(
        self, results: Mapping[str, Array], states: Collection[str], copies: int
    ) -> tuple[int, str]:
        """The number of equal results before the first that differs, and how it does."""
        if list(results) != list(self.results):
            return 0, f"the results {', '.join(self.results)}: they are {', '.join(results)}"
        for number, (name, before) in enumerate(self.results.items()):
            after = results[name]
            if name in states and before.ndim == after.ndim:
                before = _repeated(before, after.shape, copies)
                after = after[tuple(map(slice, before.shape))]
            difference = compare(before, after, self.tolerance or 0.0)
            if difference is not None:
                return number, f"the result {name}: {difference}"
        return len(self.results), ""


def _repeated(array: Array, shape: Shape, copies: int) -> Array:
    """The array with up to so many copies of each entry, where a shape has a larger fixed size."""
    for dim, (n, size) in enumerate(zip(shape, array.shape, strict=False)):
        if isinstance(n, int) and 0 < size < n:
            array = np.repeat(array, min(copies, n // size), dim)
    return array


def _padded(array: Array, shape: Shape, copies: int) -> Array:
    """The same, and zeros at the end."""
    array = _repeated(array, shape, copies)
    pairs = zip(shape, array.shape, strict=False)
    more = [n - size if isinstance(n, int) and n > size else 0 for n, size in pairs]
    return np.pad(array, [(0, n) for n in more]) if any(more) else array


def tolerance_of(module: Module) -> float:
    """That of the narrowest float among the arguments, and of 16-bit weights."""
    dtypes = [arg.type.dtype for arg in module.main.args if is_float(arg.type.dtype)]
    dtypes += [w.type.dtype for w in module.weights.values() if w.type.dtype in SHORT]
    usual = TOLERANCES["f32"]
    return max((TOLERANCES.get(dtype, usual) for dtype in dtypes), default=usual)


def compare(before: Array, after: Array, tolerance: float) -> str | None:
    """A description of differences beyond rounding, or None.

    Integers and bools must be equal; infinities and NaN must be at equal positions. Floats may
    differ by `tolerance` relative to the larger of the two, or to the largest usual number: numbers
    far above the others, as those of masks, do not count.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"{before.dtype}{list(before.shape)} becomes {after.dtype}{list(after.shape)}"
    exact, allowed = not is_float(dtype_of(before)), ""
    a, b = before, after
    if exact:
        wrong = np.asarray(a != b)
    else:
        a, b = before.astype(np.float64), after.astype(np.float64)
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            off = np.abs(a - b)
            scale = np.maximum(_usual(a), np.maximum(np.abs(a), np.abs(b)))
            near = np.isfinite(scale) & (off <= tolerance * scale)  # false where one is NaN
        wrong = ~(equal | near)
        scaled = np.isfinite(scale) & (scale > 0)
        worst = (off[scaled] / scale[scaled]).max(initial=0.0)
        allowed = f"; by up to {worst:.2g} of the largest number, where {tolerance:g} is allowed"
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    count = int(wrong.sum())
    first = f"first at {list(at)}: {a[at]} becomes {b[at]}"
    return f"{count} of {wrong.size} elements differ, {first}{allowed}"


def _usual(array: Array) -> float:
    """The largest magnitude up to 1000, or up to 1000 times that of a quarter of the numbers.

    Equal numbers count once, so that a mask that fills most of an array is no usual number.
    """
    sizes = np.abs(array[np.isfinite(array) & (array != 0)])
    few = np.unique(sizes[:: 1 + sizes.size // _SAMPLED])
    most = 1e3 * max(1.0, few[len(few) // 4]) if few.size else 0.0
    return sizes[sizes <= most].max(initial=0.0)


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
