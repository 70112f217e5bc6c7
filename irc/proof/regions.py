"""Parts of modules evaluated on random arrays, on all ranks, by the reference backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np

from ..analysis.sizes import LocalSizes
from ..analysis.units import amount
from ..errors import Error
from ..ir.core import Function, Module, Value
from ..ir.dtypes import is_float, numpy_dtype
from ..ir.layouts import join_arrays
from ..ir.types import TensorType
from ..pipeline.instruments.numerics import compare, small_sizes
from .graph import Graph, Item, Step
from .references import Randomized

Limited: TypeAlias = Callable[[Mapping[str, int]], Mapping[str, int]]  # limits for sizes
Array: TypeAlias = np.ndarray[Any, Any]
INTEGERS = ("any", "valid", "few", "none")
_NARROW = ("f32", "f16", "bf16")
_SCALES = (1.0, 0.05, 3.0)
_LARGEST = 5 << 29  # bytes of the arrays of one evaluation
_SAME = 1e-6  # what ranks of one part may differ by
_MOST = 500  # the largest integer of arguments without a limit
_LARGEST_SIZE = 192  # of symbols
_CHEAP = 1 << 27  # bytes of the arrays of an evaluation with larger sizes
_TINY, _HUGE, _MOST_PLANTED = 1e-6, 1e4, 1e6  # a factor; numbers; the largest constant
_OUTSIDE = 7  # how far beyond the limit integers are
_PLAIN = {"shape", "dims", "head_dim", "group", "groups", "group_size", "rotary_dim", "order"}


@dataclass(frozen=True)
class Region:
    """The steps behind some values, in order, and the items where it begins."""

    graph: Graph
    outputs: tuple[Item, ...]
    steps: tuple[Step, ...]
    leaves: tuple[Item, ...]


def region(graph: Graph, outputs: Sequence[Item], stops: Callable[[Item], bool]) -> Region:
    """The region behind `outputs`; it begins at arguments, weights and where `stops` is true."""
    steps: dict[Step, None] = {}
    leaves: dict[Item, None] = {}
    waiting: list[tuple[Item, bool]] = [(item, False) for item in reversed(outputs)]
    while waiting:
        item, is_ready = waiting.pop()
        if item.step is None or stops(item):
            leaves[item] = None
        elif is_ready:
            steps[item.step] = None
        elif item.step not in steps:
            waiting.append((item, True))
            waiting += [(operand, False) for operand in reversed(item.step.operands)]
    return Region(graph, tuple(outputs), tuple(steps), tuple(leaves))


@dataclass(frozen=True)
class Draw:
    """Random arrays by seed: the sizes of symbols, the scale of floats, the range of integers.

    `limits` are the largest numbers of integer arguments by name, `keys` by dtype numbers that
    others are drawn from too. `integers` go out of range as well ("any"), to the limit ("valid"),
    to 1 ("few"), or to 0 ("none"). `planted` are floats and integers near which some are drawn,
    beside zeros, large and tiny ones.
    """

    sizes: Mapping[str, int]
    scale: float
    seed: int
    limits: Mapping[str, int]
    keys: Mapping[str, Array]
    integers: str = "any"
    planted: tuple[float, ...] | None = None

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{sizes or 'no symbols'}; scale {self.scale:g}"

    def tensor(self, item: Item, module: Module) -> Array:
        """The global tensor that an item is; equal for items of one number, or arguments of one
        name."""
        type, local = item.type.global_type, LocalSizes(module.mesh, self.sizes)
        shape = tuple(map(local.dim, type.shape))
        key = item.name if item.step is None else str(item.tensor)
        rng = np.random.default_rng([self.seed, *key.encode()])
        if is_float(type.dtype):
            drawn = rng.standard_normal(shape) * self.scale
            return drawn if self.planted is None else _planted(drawn, self.planted, rng)
        if type.dtype == "bool" or self.integers in ("few", "none"):
            return rng.integers(0, 1 + (self.integers != "none"), shape)
        most = self.limits.get(item.name, _MOST)
        drawn: Array = rng.integers(0, most + 1, shape)
        special = (
            [-1, most + 1, 0, -2, most + _OUTSIDE, most] if self.integers == "any" else [0, most]
        )
        if item.name not in self.limits:
            special += [int(c) + i for c in self.planted or () if c == int(c) for i in (0, -1, 1)]
            if type.dtype in self.keys:
                is_key = rng.random(shape) < 0.7
                drawn = np.where(is_key, rng.choice(self.keys[type.dtype], shape), drawn)
        count = min(len(special), max(1, drawn.size // 2))
        places = rng.permutation(drawn.size)[:count]
        first = self.seed * count  # the next ones in the next draw
        drawn.reshape(-1)[places] = [
            special[(first + i) % len(special)] for i in range(len(places))
        ]
        return drawn


def _planted(drawn: Array, constants: Sequence[float], rng: np.random.Generator) -> Array:
    """Floats, some near constants, zero or equal; the first row tiny, half of the last large."""
    if not drawn.size:
        return drawn
    close = [c * (1 + i) for c in constants for i in (0.0, -1e-3, 1e-3)]
    near = np.array([0.0, drawn.flat[0], *close, *(-c for c in close)])
    places = np.less(rng.random(drawn.size), 0.3)
    rows = drawn.reshape(-1, drawn.shape[-1] if drawn.ndim else 1)
    rows.flat[places] = rng.choice(near, int(places.sum()))
    if len(rows) > 2:
        rows[0] = np.abs(rows[0]) * _TINY
        large = rows[-1, : 1 + rows.shape[1] // 2]
        large[:] = np.copysign(_HUGE, large)
        large[0] = _HUGE
    return drawn


def draws(
    a: Module, b: Module, count: int, seed: int, keys: Mapping[str, Array], limits: Limited
) -> list[Draw]:
    """Draws of different sizes and scales; see `Draw`. `limits` are those for sizes."""
    most = {name: high for module in (b, a) for name, (_, _, high) in module.dims.items()}
    small = small_sizes(b) | small_sizes(a)
    made: list[Draw] = []
    for i in range(count):
        sizes = {name: min(size + i % 2, most.get(name, size + 1)) for name, size in small.items()}
        made.append(Draw(sizes, _SCALES[i % len(_SCALES)], seed + i, limits(sizes), keys))
    return made


def fitted(draw: Draw, index: int, parts: Sequence[Region], limits: Limited) -> Draw:
    """A draw for regions: every third with floats near their constants, every third with sizes
    above their integers."""
    if index % 3 == 1:
        floats = [c for part in parts for c in constants(part) if abs(c) <= _MOST_PLANTED]
        return replace(draw, planted=tuple(dict.fromkeys(floats)))
    largest = max([0, *(c for part in parts for c in wholes(part) if c <= _LARGEST_SIZE)])
    if index % 3 != 2 or not largest:
        return draw
    dims = parts[-1].graph.module.dims
    sizes = dict(draw.sizes)
    for i, (name, size) in enumerate(draw.sizes.items()):
        wanted = size if name == "B" else 1 + i + largest * (2 if name == "C" else 1) + size
        sizes[name] = max(size, min(wanted, dims[name][2] if name in dims else wanted))
    grown = replace(draw, sizes=sizes, limits=limits(sizes))
    return grown if all(_bytes(part, grown, "f64") <= _CHEAP for part in parts) else draw


def constants(part: Region) -> list[float]:
    """The numbers of a region: attributes, and the elements of constants."""
    found: list[float] = []
    for step in part.steps:
        for name, value in step.op.attributes.items():
            few = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
            of_fixed = name in ("start", "stop", "sizes") and _is_fixed(step)
            if name not in _PLAIN and not of_fixed:
                kinds = [x for x in few[:64] if isinstance(x, (int, float))]
                found += [x for x in kinds if not isinstance(x, bool) and np.isfinite(x)]
    return found


def wholes(part: Region) -> list[int]:
    """The positive integers among the numbers of a region."""
    return [c for c in constants(part) if isinstance(c, int) and c > 0]


def _is_fixed(step: Step) -> bool:
    """Whether the dimension that a step slices has a fixed size."""
    dim: int = step.op.attributes["dim"]
    return isinstance(step.operands[0].type.shape[dim], int)


def is_exact(part: Region) -> bool:
    """Whether floats are only moved, so that every dtype gives the same numbers."""
    made = [step for step in part.steps if is_float(step.results[0].type.dtype)]
    return all(step.op.moves_data or step.op.opname in ("where", "full") for step in made)


class Evaluator:
    """Evaluates regions; weights are random, the same for one source in all modules."""

    def __init__(self, modules: Sequence[Module], bases: Sequence[str]) -> None:
        self.weights = Randomized(modules, bases)
        self._read: dict[tuple[int, str], list[Array]] = {}

    def outputs(
        self, part: Region, draw: Draw, kind: str, given: Mapping[str, Array]
    ) -> list[Array]:
        """The global tensors of the outputs; of those that vary what every rank has.

        `kind` is the dtype of floats, their own if it is empty. `given` are arguments by name that
        are not drawn. An Error where the region is too large, or not evaluable, or where ranks
        differ that should be equal.
        """
        from ..ops import Cast

        module, steps = part.graph.module, Function("forward")
        total = _bytes(part, draw, kind)
        if total > _LARGEST:
            most = f"at most {amount(_LARGEST)} are evaluated"
            raise Error(f"its arrays have {amount(total)}; {most}")
        values: dict[Item, Value] = {}
        inputs: dict[str, Any] = {}
        for i, item in enumerate(part.leaves):
            type = _widened(item.type, kind)
            values[item] = steps.add_argument(f"x{i}", type)
            arrays = self._arrays(module, item, draw, given)
            typed = [array.astype(numpy_dtype(type.dtype), copy=False) for array in arrays]
            inputs[f"x{i}"] = typed if len(typed) > 1 else typed[0]
        for step in part.steps:
            wider = kind and step.op.attributes.get("dtype") in _NARROW
            rounds = step.op.opname == "cast" and not is_float(step.operands[0].type.dtype)
            changes = {"dtype": kind} if wider and not rounds else {}
            op = steps.append(step.op.rebuilt([values[i] for i in step.operands], **changes))
            if wider and rounds:
                op = steps.append(Cast(op.results[0], dtype=kind))
            for item, value in zip(step.results, op.results, strict=True):
                value.type = _widened(item.type, kind)
                values[item] = value
        ranks = _run(module, steps, [values[item] for item in part.outputs], inputs, draw)
        pairs = zip(ranks, part.outputs, strict=True)
        return [_whole(arrays, item.type, module, draw) for arrays, item in pairs]

    def _arrays(
        self, module: Module, item: Item, draw: Draw, given: Mapping[str, Array]
    ) -> list[Array]:
        """What every rank has of a weight; of anything else the global tensor."""
        if item.weight is None:
            is_given = item.step is None and item.name in given
            return [given[item.name] if is_given else draw.tensor(item, module)]
        key = id(module), item.name
        if key not in self._read:
            ranks = range(module.mesh.ranks if module.local else 1)
            self._read[key] = [self.weights.array(module, item.weight, rank) for rank in ranks]
        return self._read[key]


def _bytes(part: Region, draw: Draw, kind: str) -> int:
    """The bytes of all arrays of all ranks."""
    module = part.graph.module
    local = LocalSizes(module.mesh, draw.sizes)
    items = [*part.leaves, *(item for step in part.steps for item in step.results)]
    total = sum(local.bytes(_widened(item.type, kind)) for item in items)
    return total * (module.mesh.ranks if module.local else 1)


def _run(
    module: Module, steps: Function, outputs: list[Value], inputs: Mapping[str, Any], draw: Draw
) -> list[list[Array]]:
    from ..backends.reference.evaluate import Run
    from ..ops import Return

    steps.append(Return(outputs))
    own = Module("region", module.mesh, module.dims, module.local)
    own.add_function(steps)
    try:
        return Run(own, inputs, sizes=draw.sizes).results
    except (ValueError, IndexError, MemoryError) as error:
        raise Error(f"it is not evaluable: {error}") from None


def _widened(type: TensorType, kind: str) -> TensorType:
    return type.replace(dtype=kind) if kind and type.dtype in _NARROW else type


def _whole(arrays: list[Array], type: TensorType, module: Module, draw: Draw) -> Array:
    """The global tensor of what the ranks have."""
    mesh, whole = module.mesh, type.global_type
    if module.local and whole.partial:
        groups = {rank: group for group in mesh.groups(whole.partial) for rank in group}
        arrays = [np.sum([arrays[r] for r in groups[i]], axis=0) for i in range(mesh.ranks)]
    if not module.local:
        return arrays[0]
    if whole.varying:
        return np.stack(arrays)
    shards: dict[tuple[int, ...], Array] = {}
    for rank, array in enumerate(arrays):
        first = shards.setdefault(tuple(mesh.index(rank, axes) for axes in whole.axes), array)
        difference = None if first is array else compare(first, array, _SAME)
        if difference is not None:
            raise Error(f"rank {rank} has other numbers than a rank of the same part: {difference}")
    if not any(whole.axes):
        return arrays[0]
    shape = tuple(map(LocalSizes(mesh, draw.sizes).dim, whole.shape))
    return join_arrays(arrays, whole.axes, mesh, shape)
