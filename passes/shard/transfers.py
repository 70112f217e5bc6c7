"""Inserts the collectives that a solver needs, each once for all users of its result."""

from __future__ import annotations

import re

from irc.analysis.places import value_name
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dims import exact_divide
from irc.ir.types import Axes
from irc.ops import AllGather, AllReduce, AllToAll, ReduceScatter, ShardSlice
from irc.pipeline import Stats


class Transfers:
    """Inserts collectives before the operation `op` of a function.

    With `sequence` sums over tp are scattered over the tokens. Inserted operations are added to
    `seen`.
    """

    def __init__(
        self, module: Module, function: Function, stats: Stats, sequence: bool, seen: set[Op]
    ) -> None:
        self._module, self._function, self._stats = module, function, stats
        self._sequence, self._seen = sequence, seen
        self._made: dict[tuple[object, ...], Value] = {}

    def finished(self, op: Op, value: Value) -> Value:
        """The complete sum of a partial one."""
        axes = tuple(axis for axis in self._module.mesh.names if axis in value.type.partial)
        name, dim = ".".join(axes), self._scatter_dim(value, axes)
        why = f"{op.opname} needs the complete sum"
        if dim is not None:
            return self._once(op, value, ReduceScatter, why, axis=name, dim=dim)
        return self._once(op, value, AllReduce, why, axis=name)

    def _scatter_dim(self, value: Value, axes: Axes) -> int | None:
        """The dimension of the tokens, where they stay sharded between blocks."""
        type = value.type
        inside = {"ep", "tp"} & set(axes)
        if not self._sequence or not inside or type.ndim < 3 or type.axes[1]:
            return None
        size, group_size = type.shape[1], self._module.mesh.group_size(axes)
        if isinstance(size, int):
            return 1 if size >= group_size else None
        return None if exact_divide(size, group_size) is None else 1

    def gathered(self, op: Op, value: Value, dim: int, axes: Axes, why: str) -> Value:
        """A dimension replicated over the innermost of its axes."""
        return self._once(op, value, AllGather, why, axis=".".join(axes), dim=dim)

    def part(self, op: Op, value: Value, dim: int, axes: Axes) -> Value:
        """A dimension sharded over more axes."""
        why = f"{op.opname} has it sharded in another operand"
        return self._once(op, value, ShardSlice, why, axis=".".join(axes), dim=dim)

    def exchanged(self, op: Op, value: Value, split: int, concat: int) -> Value:
        """The axes of dimension `concat` moved to `split`."""
        axis, why = ".".join(value.type.axes[concat]), f"{op.opname} needs it sharded elsewhere"
        return self._once(op, value, AllToAll, why, axis=axis, split=split, concat=concat)

    def _once(
        self, op: Op, value: Value, kind: type[Op], why: str, **attributes: str | int
    ) -> Value:
        key = (value, kind.opname, *attributes.values())
        known = self._made.get(key)
        if known is not None:
            return known
        new = kind(value, **attributes, loc=value.producer.loc if value.producer else op.loc)
        suffix = "full" if kind in (AllReduce, AllGather) else "part"
        new.result.name = _name(value, suffix)
        self._function.insert(new, op)
        self._made[key] = new.result
        self._seen.add(new)
        self._stats.count(new.opname)
        where = f" ({op.loc.where()})" if op.loc is not None else ""
        self._stats.explain(f"{new.opname} of {_shown(value)}, which is {value.type}: {why}{where}")
        return new.result


def _shown(value: Value) -> str:
    """A value as notes call it."""
    if value.name is None and value.producer is not None:
        return f"the result of {value.producer.opname}"
    return value_name(value)


def _name(value: Value, suffix: str) -> str | None:
    """The name of a value that holds more or less of another."""
    if value.name is None:
        return None
    base = value.name
    if isinstance(value, Weight):
        base = re.sub(r"^[^A-Za-z]+", "", "_".join(base.split(".")[-2:])) or "weight"
    return f"{base.removesuffix('_full').removesuffix('_part')}_{suffix}"
