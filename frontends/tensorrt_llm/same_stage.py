"""The networks of the ranks of one pipeline stage, compared and joined into one function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ... import ops
from ...errors import Error
from ...ir.core import Function, Module, Op, Value, Weight
from ...ir.dtypes import numpy_dtype
from ...source import Loc
from ...weights import ConcatRef, Ref, Shard, Unsqueeze
from .arrays import Array, ArrayFile
from .module import Parameter
from .network import Network

_MOST_NUMBERS = 16  # of a constant


class Stage:
    """One function that computes, on every rank, what the network of the rank says.

    `results` holds the joined outputs by name.
    """

    def __init__(
        self, module: Module, arrays: ArrayFile, networks: Mapping[int, Network], number: int
    ) -> None:
        self.module, self.mesh, self.arrays, self.number = module, module.mesh, arrays, number
        self.ranks, self.networks = list(networks), list(networks.values())
        self.first = self.networks[0]
        self.function = Function("forward")
        self._maps: list[dict[Value, Value]] = [{} for _ in self.networks]
        self._weights: dict[tuple[Value, ...], Value] = {}
        self._names = [network.weight_names() for network in self.networks]
        self._loc: Loc | None = None
        self._count = 0
        self._join_arguments()
        self._join_operations()
        self.results = self._join_outputs()

    def merged(self, value: Value) -> Value:
        """The joined value of one of the first rank."""
        if isinstance(value, Weight):
            return self._operand([self._same_weight(value, at) for at in range(len(self.ranks))])
        return self._maps[0][value]

    # -- comparison

    def _join_arguments(self) -> None:
        for arg in self.first.function.args:
            joined = self.function.add_argument(str(arg.name), arg.type)
            self._maps[0][arg] = joined
            for at in range(1, len(self.ranks)):
                other = self.networks[at].inputs.get(str(arg.name))
                if other is None or other.type is not arg.type:
                    found = "no such input" if other is None else str(other.type)
                    raise Error(
                        f"the input {arg.name} is {arg.type} on rank {self.ranks[0]}, and rank "
                        f"{self.ranks[at]} has {found}; expected the same inputs on every rank"
                    )
                self._maps[at][self.networks[at].function.arg(str(arg.name))] = joined
        for rank, network in zip(self.ranks, self.networks, strict=True):
            for name in network.inputs.keys() - self.first.inputs.keys():
                raise Error(f"rank {rank} has the input {name}, and rank {self.ranks[0]} has not")

    def _join_operations(self) -> None:
        lists = [network.ordered() for network in self.networks]
        shortest = min(map(len, lists))
        for row in zip(*lists, strict=False):
            self._join(list(row))
        for at, ops_of_rank in enumerate(lists):
            if len(ops_of_rank) > shortest:
                short = next(i for i, each in enumerate(lists) if len(each) == shortest)
                raise self._difference(
                    f"{ops_of_rank[shortest].opname}, which rank {self.ranks[short]} has not",
                    ops_of_rank[shortest],
                    lists[short][-1] if lists[short] else None,
                    at,
                    short,
                )

    def _join(self, row: list[Op]) -> None:
        first = row[0]
        self._loc = first.loc
        for at, op in enumerate(row):
            if type(op) is not type(first) or len(op.operands) != len(first.operands):
                raise self._difference(
                    f"{op.opname}, where rank {self.ranks[0]} has {first.opname}", op, first, at
                )
        operands = self._operands(row)
        results = self._varying(row, operands)
        if results is None:
            self._check_attributes(row)
            new = first.rebuilt(operands)
            self.function.append(new)
            results = new.results
        for old, new_value in zip(first.results, results, strict=True):
            if new_value.type is not old.type:
                raise Error(
                    f"a result of {first.opname} is {new_value.type}, not {old.type}", first
                )
            new_value.name = old.name
        for at, op in enumerate(row):
            self._maps[at].update(zip(op.results, results, strict=True))

    def _operands(self, row: list[Op]) -> list[Value]:
        found: list[Value] = []
        for place in range(len(row[0].operands)):
            values = [op.operands[place] for op in row]
            if isinstance(values[0], Weight):
                found.append(self._operand(values))
                continue
            joined = [m.get(value) for m, value in zip(self._maps, values, strict=True)]
            other = next((at for at, each in enumerate(joined) if each is not joined[0]), None)
            if other is not None or joined[0] is None:
                raise self._difference(
                    f"another operand {place} of {row[0].opname}",
                    row[other or 0],
                    row[0],
                    other or 0,
                )
            found.append(joined[0])
        return found

    def _check_attributes(self, row: list[Op]) -> None:
        first = row[0]
        for at, op in enumerate(row):
            for name, value in first.attributes.items():
                other = op.attributes[name]
                if other != value:
                    raise self._difference(
                        f"{name}={other} of {op.opname}, where rank {self.ranks[0]} has "
                        f"{name}={value}",
                        op,
                        first,
                        at,
                    )

    def _join_outputs(self) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, output in self.first.outputs.items():
            for rank, network in zip(self.ranks, self.networks, strict=True):
                if name not in network.outputs:
                    raise Error(f"rank {rank} does not mark the output {name}, as rank 0 does")
            values = [network.outputs[name].value for network in self.networks]
            if isinstance(output.value, Weight):
                found[name] = self._operand(values)
                continue
            joined = [m[value] for m, value in zip(self._maps, values, strict=True)]
            if any(each is not joined[0] for each in joined):
                raise Error(f"the output {name} is another value on some rank")
            found[name] = joined[0]
        return found

    def _difference(self, what: str, op: Op, first: Op | None, at: int, other: int = 0) -> Error:
        there = first.loc.where() if first is not None and first.loc is not None else "its end"
        return Error(
            f"rank {self.ranks[at]} has {what} (rank {self.ranks[other]}: {there}); the networks "
            "of the ranks of one pipeline stage must be the same but for numbers and arrays",
            loc=op.loc,
        )

    # -- numbers that differ

    def _varying(self, row: list[Op], operands: list[Value]) -> tuple[Value, ...] | None:
        """The results of operations that differ in numbers by rank; None where they do not."""
        first = row[0]
        if isinstance(first, (ops.Constant, ops.Full)):
            return self._constant(row)
        if isinstance(first, ops.Slice):
            return self._slice(cast("list[ops.Slice]", row), operands)
        return None

    def _constant(self, row: list[Op]) -> tuple[Value, ...] | None:
        rows = [op.attributes for op in row]
        numbers = [each["values"] if "values" in each else (each["value"],) for each in rows]
        kinds = [(each["dtype"], each["shape"]) for each in rows]
        if all(each == numbers[0] for each in numbers) or any(k != kinds[0] for k in kinds):
            return None
        dtype, shape = kinds[0]
        if len(numbers[0]) == 1:
            value = self._by_rank([each[0] for each in numbers], dtype)
            same_size = all(size == 1 for size in shape)
            if shape and same_size:
                value = self._add(ops.Reshape(value, shape=shape))
            elif shape:
                value = self._add(ops.Expand(value, shape=shape))
            return (value,)
        self._count += 1
        name = f"stage{self.number}.by_rank_{self._count}"
        arrays = [np.array(n).astype(numpy_dtype(dtype)).reshape(shape) for n in numbers]
        return (self._weight(name, row[0].results[0].type, self._per_rank(name, arrays)),)

    def _slice(self, row: list[ops.Slice], operands: list[Value]) -> tuple[Value, ...] | None:
        """Slices of one size that begin elsewhere on every rank: a gather."""
        first = row[0]
        starts = [op.start for op in row]
        size = first.result.type.shape[first.dim]
        alike = all(
            (op.dim, op.step) == (first.dim, first.step)
            and op.result.type is first.result.type
            and isinstance(op.start, int)
            for op in row
        )
        if not alike or all(start == starts[0] for start in starts):
            return None
        places: Value = self._add(ops.Iota(size=size))
        if first.step != 1:
            places = self._add(ops.Mul(places, self._number(first.step, "i32")))
        start = self._by_rank(cast("list[int]", starts), "i32")
        places = self._add(ops.Add(places, start))
        return (self._add(ops.Gather(operands[0], places, dim=first.dim)),)

    def _by_rank(self, numbers: Sequence[Any], dtype: str) -> Value:
        """A scalar that is `numbers[i]` on rank i: a multiple of the rank number, or a lookup."""
        axes, table = self._table(numbers)
        rank = self._add(ops.Rank(axis=".".join(axes)))
        step = table[1] - table[0] if dtype in ("i32", "i64") else None
        if step is not None and all(n == table[0] + step * i for i, n in enumerate(table)):
            found = rank if dtype == "i32" else self._add(ops.Cast(rank, dtype=dtype))
            if step != 1:
                found = self._add(ops.Mul(found, self._number(step, dtype)))
            if table[0]:
                found = self._add(ops.Add(found, self._number(table[0], dtype)))
            return found
        if len(table) > _MOST_NUMBERS:
            raise Error(
                f"a number that differs on {len(table)} ranks without a rule", loc=self._loc
            )
        values = self._add(ops.Constant(values=tuple(table), shape=(len(table),), dtype=dtype))
        return self._add(ops.Gather(values, rank, dim=0))

    def _table(self, items: Sequence[Any]) -> tuple[tuple[str, ...], list[Any]]:
        """The fewest axes by whose position the items can be looked up, and the items by it."""
        inner = [axis for axis in self.mesh.names if axis != "pp"]
        for axes in [*((axis,) for axis in reversed(inner)), tuple(inner)]:
            table: dict[int, Any] = {}
            places = [self.mesh.index(rank, axes) for rank in self.ranks]
            if all(
                _equal(table.setdefault(place, item), item)
                for place, item in zip(places, items, strict=True)
            ):
                return axes, [table[i] for i in range(len(table))]
        raise AssertionError("the ranks of a stage are those of all its axes")

    def _number(self, value: float, dtype: str) -> Value:
        return self._add(ops.Constant(values=(value,), dtype=dtype))

    def _add(self, op: Op) -> Value:
        op.loc = self._loc
        self.function.append(op)
        return op.result

    # -- weights

    def _operand(self, values: Sequence[Value]) -> Value:
        """The joined weight of one weight per rank."""
        key = tuple(values)
        if key not in self._weights:
            self._weights[key] = self._join_weights(key)
        return self._weights[key]

    def _same_weight(self, weight: Value, at: int) -> Value:
        name = self._names[0][weight][0]
        return next(w for w, (other, _) in self._names[at].items() if other == name)

    def _join_weights(self, values: tuple[Value, ...]) -> Value:
        found: list[tuple[str, Parameter]] = []
        for at, value in enumerate(values):
            if value not in self._names[at]:
                raise Error(
                    f"rank {self.ranks[at]} uses no weight where rank {self.ranks[0]} uses one"
                )
            found.append(self._names[at][value])
        name, first = found[0]
        for rank, (other, parameter) in zip(self.ranks, found, strict=True):
            if other != name:
                raise Error(f"rank {rank} uses the weight {other} where rank 0 uses {name}")
            if parameter.type is not first.type:
                raise Error(
                    f"the weight {name} is {parameter.type} on rank {rank} and {first.type} on "
                    f"rank {self.ranks[0]}; expected one local shape"
                )
        bound = [parameter.bound for _, parameter in found]
        arrays = [each for each in bound if isinstance(each, np.ndarray)]
        if arrays and len(arrays) < len(bound):
            raise Error(f"the weight {name} has an array on some ranks only; set it on all")
        key = self._free_name(name)
        if arrays:
            return self._weight(key, first.type, self._per_rank(key, arrays))
        refs = [parameter.reference(name, self.mesh) for _, parameter in found]
        return self._weight(key, first.type, self._shards(refs, first.type.ndim))

    def _free_name(self, name: str) -> str:
        return name if name not in self.module.weights else f"stage{self.number}.{name}"

    def _weight(self, name: str, type: Any, ref: Ref) -> Value:
        """A weight of the module; a scalar that differs by rank is stored as a vector of one."""
        known = self.module.weights.get(name)
        assert known is None, name
        if type.ndim or not isinstance(ref, ConcatRef):
            return self.module.add_weight(Weight(type, name, ref))
        vector = self.module.add_weight(Weight(type.replace(shape=(1,), axes=((),)), name, ref))
        return self._add(ops.Reshape(vector, shape=()))

    def _per_rank(self, key: str, arrays: Sequence[Array]) -> Ref:
        """The reference of an array per rank; equal ones are stored once."""
        axes, table = ((), arrays[:1]) if _all_equal(arrays) else self._table(arrays)
        if not axes:
            return self.arrays.add(key, arrays[0])
        refs = [self.arrays.add(f"{key}.rank{i}", array) for i, array in enumerate(table)]
        return _joined(refs, arrays[0].ndim, axes)

    def _shards(self, refs: list[Ref], ndim: int) -> Ref:
        if all(ref == refs[0] for ref in refs):
            return refs[0]
        axes, table = self._table(refs)
        return _joined(table, ndim, axes)


def _joined(refs: Sequence[Ref], ndim: int, axes: tuple[str, ...]) -> Ref:
    """One reference per rank, as shards of their concatenation."""
    parts = tuple(refs) if ndim else tuple(ref.then(Unsqueeze(0)) for ref in refs)
    return ConcatRef(parts, 0).then(Shard(0, axes))


def _all_equal(arrays: Sequence[Array]) -> bool:
    return all(_equal(array, arrays[0]) for array in arrays)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not isinstance(a, np.ndarray):
        return type(a) is type(b) and bool(a == b)
    return np.array_equal(_bits(cast("Array", a)), _bits(cast("Array", b)))


def _bits(array: Array) -> Array:
    """The bytes of an array, so that NaN equals itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
