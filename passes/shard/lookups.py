"""Lookups, argmax, topk and scales per token, whose ids or values are sharded."""

from __future__ import annotations

from irc.ir.core import Function, Op, Value
from irc.ops import (
    Abs,
    AllToAll,
    Argmax,
    DynamicScale,
    Embedding,
    ReduceScatter,
    ShardedMax,
    ShardedTopk,
    Squeeze,
    Topk,
)
from irc.pipeline import Stats

from ..shared.edit import insert_before, retype
from .transfers import Transfers


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
