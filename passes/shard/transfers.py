"""Inserts collectives, and what lookups, choices and expert slots become over shards."""

from __future__ import annotations

import re

from irc.analysis.places import value_name
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dims import exact_divide
from irc.ir.sharding import named_dims, operand_words, parse_rule
from irc.ir.types import Axes
from irc.ops import (
    Abs,
    AllGather,
    AllReduce,
    AllToAll,
    Argmax,
    DynamicScale,
    Embedding,
    MoeCombine,
    MoeDispatch,
    MoeSlots,
    ReduceScatter,
    ShardedMax,
    ShardedTopk,
    ShardSlice,
    Squeeze,
    Topk,
)
from irc.ops.moe import Routed
from irc.pipeline import Stats

from ..shared.edit import change, insert_before, retype


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

    def copies_of(self, value: Value) -> list[Value]:
        """The values that `gathered` made of all shards of a dimension of a value."""
        dims = [(dim, ".".join(axes)) for dim, axes in enumerate(value.type.axes) if axes]
        copies = (self._made.get((value, AllGather.opname, axes, dim)) for dim, axes in dims)
        return [copy for copy in copies if copy is not None]

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
        inserted = self._made.get(key)
        if inserted is not None:
            return inserted
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


# -- lookups, argmax, topk and scales per token, whose ids or values are sharded


def look_up_parts(function: Function, op: Embedding, transfers: Transfers, stats: Stats) -> bool:
    """Gather ids that are sharded over the axes of their table; scatter the rows.

    Every rank looks up all ids and gets the rows of its own.
    """
    ids, table = op.ids.type, op.table.type
    over = table.axes[0] or table.axes[1]
    dim = next((i for i, axes in enumerate(ids.axes) if axes and axes == over), None)
    if dim is None or all(table.axes):
        return False
    every = transfers.gathered(op, op.ids, dim, over, "their table is sharded over the same ranks")
    op.set_operands((every, op.table))
    rows, axis = op.result, ".".join(over)
    retype(op)
    if table.axes[0]:
        new: Op = ReduceScatter(rows, axis=axis, dim=dim)
    else:
        new = AllToAll(rows, axis=axis, split=dim, concat=ids.ndim)
    new.loc = op.loc
    function.insert(new, op.next)
    rows.replace_by(new.result)
    new.set_operands((rows,))
    new.result.name = f"{rows.name}_part" if rows.name else None
    stats.count(new.opname)
    return True


def choose_across(op: Argmax | Topk, stats: Stats) -> bool:
    """argmax and topk over a sharded dimension send candidates, not the values."""
    value = op.x
    dim, k = op.dim % value.type.ndim, op.k if isinstance(op, Topk) else 1
    axes = value.type.axes[dim]
    if not axes or not isinstance(k, int) or not isinstance(value.type.shape[dim], int):
        return False
    new = insert_before(ShardedTopk(value, k=k, axis=".".join(axes), dim=dim), op)
    results: tuple[Value, ...] = new.results
    if isinstance(op, Argmax):
        place = results[1]
        if not op.keep:
            place = insert_before(Squeeze(place, dims=(dim,)), op).result
        results = (place,)
    for old, result in zip(op.results, results, strict=True):
        old.replace_by(result)
    op.erase()
    stats.count("sharded_topk")
    stats.explain(f"{op.opname} over {'.'.join(axes)} exchanges {k} candidates per rank")
    return True


def scale_across(op: DynamicScale, stats: Stats) -> bool:
    """A scale per token of sharded features follows from the largest of every rank."""
    axes = op.x.type.axes[-1]
    if op.block or not axes:
        return False
    sizes = insert_before(Abs(op.x), op)
    most = insert_before(ShardedMax(sizes, axis=".".join(axes)), op)
    new = insert_before(op.rebuilt([most.result, *op.operands[1:]]), op)
    op.result.replace_by(new.result)
    op.erase()
    stats.count("sharded_max")
    stats.explain(f"scales per token over {'.'.join(axes)} exchange the largest of each rank")
    return True


# -- separate expert slots per rank for sharded tokens, where that does not change results
#
# It would with a capacity, because other tokens would exceed it, and where an operation depends on
# the slot numbers themselves.


_PLACES = 1  # the dimension of a buffer [experts, places, width]


def queue_apart(slots: MoeSlots, module: Module, stats: Stats) -> None:
    """Give moe operations as many parts as the tokens have shards."""
    axes = slots.chosen.type.axes[0]
    group_size = module.mesh.group_size(axes)
    if group_size == 1 or slots.parts != 1:
        return
    over = ".".join(axes)
    if slots.capacity != 0:
        stats.explain(
            f"moe_slots has a capacity, which counts the tokens of all ranks of {over}: they are "
            "gathered"
        )
        return
    routed = _users(slots)
    if routed is None or exact_divide(slots.chosen.type.shape[0], group_size) is None:
        return
    for op in (slots, *routed):
        change(op, parts=group_size)
    stats.explain(f"the tokens of every rank of {over} have expert slots of their own")


def _users(slots: MoeSlots) -> list[Routed] | None:
    """The users of the slots, if they only lead to a sum over experts."""
    users: list[Routed] = []
    for op in slots.result.users:
        if not isinstance(op, (MoeDispatch, MoeCombine)) or op.slots is not slots.result:
            return None
        if op.chosen is not slots.chosen or op.parts != 1:
            return None
        if isinstance(op, MoeDispatch) and (op.capacity != 0 or not _combined(op, slots)):
            return None
        users.append(op)
    return users


def _combined(dispatch: MoeDispatch, slots: MoeSlots) -> bool:
    """Whether every place of a buffer is treated separately until places are added up."""
    inside = [dispatch.result]
    op = dispatch.next
    while op is not None:
        if isinstance(op, MoeCombine) and op.buffer in inside:
            if op.slots is not slots.result:
                return False
        elif any(value in inside for value in op.operands):
            if not _by_place(op, inside):
                return False
            inside += op.results
        op = op.next
    return True


def _by_place(op: Op, inside: list[Value]) -> bool:
    """Whether an operation keeps the places of its operands in `inside` apart."""
    text = op.sharding_rule()
    if text is None:
        return False
    rule = parse_rule(text)
    names: set[str] = set()
    for value, (_, words) in zip(op.operands, operand_words(op, rule), strict=True):
        if value in inside:
            names |= {words[_PLACES]} if value.type.ndim == 3 else {"!"}
    if len(names) != 1 or names & (rule.replicated | rule.positions | {"1", "!"}):
        return False
    for value, (_, words) in zip(op.operands, operand_words(op, rule), strict=True):
        sized = [w for w, n in zip(words, value.type.shape, strict=True) if w in names and n != 1]
        if sized and value not in inside:
            return False
    results = rule.results * len(op.results) if len(rule.results) == 1 else rule.results
    return all(
        result.type.ndim == 3 and named_dims(words, 3)[_PLACES] in names
        for words, result in zip(results, op.results, strict=True)
    )
