"""Numbers and weights of several ranks as one value: equal, a lookup by rank, or shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from ... import ops
from ...errors import Error
from ...ir.core import Function, Module, Op, Value, Weight
from ...ir.types import TensorType
from ...source import Loc
from ...weights import ConcatRef, Ref, Shard, Unsqueeze
from .arrays import Array, ArrayFile
from .network import Named, Network

Number: TypeAlias = bool | int | float
_MOST_NUMBERS = 16  # of a constant


def is_leaf(value: Value) -> bool:
    """Whether a value is a weight or made of numbers alone."""
    return isinstance(value, Weight) or isinstance(value.producer, (ops.Constant, ops.Full))


class Leaves:
    """Appends the leaves of one pipeline stage to its function. `ranks` are those of the stage."""

    def __init__(
        self,
        module: Module,
        function: Function,
        arrays: ArrayFile,
        networks: dict[int, Network],
        stage: int,
    ) -> None:
        self.module, self.function, self.arrays, self.stage = module, function, arrays, stage
        self.ranks = list(networks)
        self.named = [network.weight_names() for network in networks.values()]
        self._known: dict[tuple[Value, ...], Value] = {}

    def value(self, leaves: Sequence[Value], loc: Loc | None) -> Value:
        """The value that is `leaves[i]` on rank i of the stage."""
        key = tuple(leaves)
        if key not in self._known:
            self._known[key] = self._joined(key, loc)
        return self._known[key]

    def start(self, numbers: Sequence[Number], loc: Loc | None) -> Value:
        """The i32 scalar that is `numbers[i]` on rank i of the stage."""
        return self._by_rank(numbers, "i32", loc)

    def add(self, op: Op, loc: Loc | None) -> Value:
        """Append an operation."""
        op.loc = loc
        self.function.append(op)
        return op.result

    def _joined(self, leaves: tuple[Value, ...], loc: Loc | None) -> Value:
        for rank, leaf in zip(self.ranks, leaves, strict=True):
            if leaf.type is not leaves[0].type:
                raise Error(
                    f"{self._title(leaves)} is {leaf.type} on rank {rank} and {leaves[0].type} on "
                    f"rank {self.ranks[0]}; expected one local shape",
                    loc=loc,
                )
        if any(isinstance(leaf, Weight) for leaf in leaves):
            return self._weights(leaves, loc)
        makers = [cast("Op", leaf.producer) for leaf in leaves]
        first, numbers = makers[0], [_numbers(op) for op in makers]
        if all(_equal(each, numbers[0]) for each in numbers):
            new = first.rebuilt(())
            new.result.name = leaves[0].name
            return self.add(new, loc)
        if all(len(each) == 1 for each in numbers):
            scalar = self._by_rank([each[0] for each in numbers], leaves[0].type.dtype, loc)
            shape = leaves[0].type.shape
            return self.add(ops.Expand(scalar, shape=shape), loc) if shape else scalar
        arrays = [op.evaluate() for op in makers]
        return self._weight("by_rank", leaves[0].type, self._stored("by_rank", arrays), loc)

    # -- numbers

    def _by_rank(self, numbers: Sequence[Number], dtype: str, loc: Loc | None) -> Value:
        """A scalar: a multiple of the rank number, a lookup in a constant, or a weight."""
        axes, table = self._table(numbers)
        if len(table) > _MOST_NUMBERS:
            arrays = [np.array(number) for number in numbers]
            stored = self._stored("by_rank", arrays)
            return self._weight("by_rank", TensorType(dtype, ()), stored, loc)

        def number(value: Number) -> Value:
            return self.add(ops.Constant(values=(value,), dtype=dtype), loc)

        rank = self.add(ops.Rank(axis=".".join(axes)), loc)
        step = table[1] - table[0]
        small = dtype in ("i32", "i64") and abs(step) < 2**31
        if small and table == [table[0] + step * i for i in range(len(table))]:
            found = rank if dtype == "i32" else self.add(ops.Cast(rank, dtype=dtype), loc)
            found = found if step == 1 else self.add(ops.Mul(found, number(step)), loc)
            return found if table[0] == 0 else self.add(ops.Add(found, number(table[0])), loc)
        values = ops.Constant(values=tuple(table), shape=(len(table),), dtype=dtype)
        return self.add(ops.Gather(self.add(values, loc), rank, dim=0), loc)

    def _table(self, items: Sequence[Any]) -> tuple[tuple[str, ...], list[Any]]:
        """The fewest axes by whose position the items can be looked up, and the items by it."""
        mesh = self.module.mesh
        inner = [axis for axis in mesh.names if axis != "pp"]
        for axes in [(), *((axis,) for axis in reversed(inner)), tuple(inner)]:
            table: dict[int, Any] = {}
            places = [mesh.index(rank, axes) for rank in self.ranks]
            if all(
                _equal(table.setdefault(place, item), item)
                for place, item in zip(places, items, strict=True)
            ):
                return axes, [table[i] for i in range(len(table))]
        raise AssertionError("the ranks of a stage are those of all its axes")

    # -- weights

    def _weights(self, leaves: tuple[Value, ...], loc: Loc | None) -> Value:
        """One weight: the same on all ranks, or shards of a concatenation."""
        found = [names.get(leaf) for names, leaf in zip(self.named, leaves, strict=True)]
        given = [each for each in found if each is not None]
        first = next((each for each in given if each.is_given), given[0])
        for rank, each in zip(self.ranks, found, strict=True):
            if first.is_given and (each is None or each.name != first.name):
                other = each.name if each is not None else "a constant"
                raise Error(
                    f"the networks use the weight {first.name} in one place, where rank {rank} "
                    f"uses {other}; the ranks of one pipeline stage must build the same network",
                    loc=loc,
                )
        arrays = [_array(leaf, each) for leaf, each in zip(leaves, found, strict=True)]
        kept = [array for array in arrays if array is not None]
        if kept and len(kept) < len(arrays):
            raise Error(
                f"the weight {first.name} has an array on some ranks only; set it on all", loc=loc
            )
        ref = self._stored(first.name, kept) if kept else self._referred(given)
        return self._weight(first.name, leaves[0].type, ref, loc)

    def _title(self, leaves: Sequence[Value]) -> str:
        found = [names.get(leaf) for names, leaf in zip(self.named, leaves, strict=True)]
        return next((f"the weight {each.name}" for each in found if each), "a constant")

    def _weight(self, name: str, type: TensorType, ref: Ref, loc: Loc | None) -> Value:
        """A weight of the module; a scalar that differs by rank is stored as a vector of one."""
        name = self._free(name, self.module.weights)
        if type.ndim or not isinstance(ref, ConcatRef):
            return self.module.add_weight(Weight(type, name, ref))
        vector = Weight(TensorType(type.dtype, (1,)), name, ref)
        return self.add(ops.Reshape(self.module.add_weight(vector), shape=()), loc)

    def _free(self, name: str, taken: Any) -> str:
        """`name`, or one like it: two pipeline stages may count their layers alike."""
        found, count = name, 0
        while found in taken:
            found = f"stage{self.stage}.{name}" + (f"_{count}" if count else "")
            count += 1
        return found

    def _stored(self, name: str, arrays: Sequence[Array]) -> Ref:
        """The reference of an array per rank; equal ones are stored once."""
        axes, table = self._table(arrays)
        titles = [f"{name}.rank{i}" if axes else name for i in range(len(table))]
        keys = [self._free(title, self.arrays.arrays) for title in titles]
        refs = [self.arrays.add(key, array) for key, array in zip(keys, table, strict=True)]
        return _shards(refs, arrays[0].ndim, axes)

    def _referred(self, found: list[Named]) -> Ref:
        refs = [each.parameter.reference(each.name, self.module.mesh, each.value) for each in found]
        axes, table = self._table(refs)
        return _shards(table, found[0].parameter.type.ndim, axes)


def _shards(refs: Sequence[Ref], ndim: int, axes: tuple[str, ...]) -> Ref:
    """One reference per rank, as shards of their concatenation; that of all ranks as it is."""
    if not axes:
        return refs[0]
    parts = tuple(refs) if ndim else tuple(ref.then(Unsqueeze(0)) for ref in refs)
    return ConcatRef(parts, 0).then(Shard(0, axes))


def _array(leaf: Value, named: Named | None) -> Array | None:
    """The array of a leaf; None of a weight without one."""
    if named is None:
        return cast("Op", leaf.producer).evaluate()
    return named.value if isinstance(named.value, np.ndarray) else None


def _numbers(op: Op) -> tuple[Number, ...]:
    """The elements of a constant, or the one number that all of them are."""
    values = op.values if isinstance(op, ops.Constant) else (cast("ops.Full", op).value,)
    return values[:1] if all(_equal(each, values[0]) for each in values) else values


def _equal(a: Any, b: Any) -> bool:
    """Whether two numbers, references or arrays are the same, in every bit."""
    if a is b:
        return True
    if isinstance(a, tuple):
        pairs = zip(cast("tuple[Any, ...]", a), b, strict=False)
        return len(a) == len(b) and all(_equal(x, y) for x, y in pairs)  # pyright: ignore
    if not isinstance(a, np.ndarray):
        return type(a) is type(b) and (repr(a) == repr(b) if isinstance(a, float) else a == b)
    return np.array_equal(_bits(cast("Array", a)), _bits(cast("Array", b)))


def _bits(array: Array) -> Array:
    """The bytes of an array, so that NaN equals itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
