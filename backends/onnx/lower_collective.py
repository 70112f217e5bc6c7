"""Collectives as DistCollective nodes, which work along dimension 0.

That dimension may be any that is outermost in memory: where a collective works along another one,
a single Transpose moves the shards of all ranks to the front, or from there to their dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnx.onnx_ml_pb2 import TensorProto

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Lowered, Rule
from irc.backends.onnx.graph import value_info
from irc.ir.dims import Shape, exact_divide, product
from irc.onnx_format.operators import COLLECTIVES
from irc.ops.collective import Exchange

_NAMES = {cls: name for name, cls in COLLECTIVES.items()}


def _group_size(e: Emitter, op: Exchange) -> int:
    return e.module.mesh.group_size(op.axes)


def _lower(*classes: type[Exchange]) -> Callable[[Rule], Rule]:
    """Registers a lowering; a group of one rank gets its own operand."""

    def register(rule: Rule) -> Rule:
        def lower(e: Emitter, op: Any) -> Lowered:
            if _group_size(e, op) > 1:
                return rule(e, op)
            return Flat(e.flat(op.x)) if e.is_flat(op.x) else e.get(op.x)

        return TABLE.lower(*classes)(lower)

    return register


def _outermost(e: Emitter, op: Any, shard: Shape) -> tuple[str, Shape, int, bool]:
    """(operand, shape of a shard, dimension, whether flat): a matrix for the last dimension."""
    dim = op.dim % op.x.type.ndim
    if dim and dim == len(shard) - 1:
        return e.flat(op.x), (product(shard[:-1]), shard[-1]), 1, True
    return e.get(op.x), shard, dim, False


def _collective(e: Emitter, op: Exchange, x: str, before: Shape, after: Shape) -> str:
    """A node on `x`, whose shapes before and after are these."""
    kind, group_size = e.dtype(op.x), _group_size(e, op)
    if e.graph.now(x) in e.graph.initializers:
        x = e.add("Identity", x)
    name = e.collective(op, _NAMES[type(op)], group_size, x)
    for value, shape in ((x, before), (name, after)):
        e.graph.values.setdefault(value, value_info(value, kind, shape))
    return name


@_lower(ops.AllReduce, ops.Broadcast, ops.Reduce)
def elementwise(e: Emitter, op: Exchange) -> Lowered:
    """DistCollective on any layout, since it works elementwise."""
    shape = op.x.type.shape
    if not e.is_flat(op.x):
        return _collective(e, op, e.get(op.x), shape, shape)
    matrix = (product(shape[:-1]), shape[-1])
    return Flat(_collective(e, op, e.flat(op.x), matrix, matrix))


@_lower(ops.AllGather, ops.CollectiveGather)
def gather(e: Emitter, op: ops.AllGather | ops.CollectiveGather) -> Lowered:
    """DistCollective, which joins the shards along dimension 0; Transpose moves them to `dim`."""
    group_size = _group_size(e, op)
    x, shard, dim, flat = _outermost(e, op, op.x.type.shape)
    joined = _collective(e, op, x, shard, (shard[0] * group_size, *shard[1:]))
    joined = _shards_to(e, joined, group_size, shard, dim)
    return Flat(joined) if flat else joined


@_lower(ops.ReduceScatter, ops.CollectiveScatter)
def scatter(e: Emitter, op: ops.ReduceScatter | ops.CollectiveScatter) -> Lowered:
    """DistCollective on shards along dimension 0, where Transpose moves them from `dim`."""
    group_size = _group_size(e, op)
    x, shard, dim, flat = _outermost(e, op, op.result.type.shape)
    shards = _shards_from(e, x, group_size, shard, dim)
    mine = _collective(e, op, shards, (shard[0] * group_size, *shard[1:]), shard)
    return Flat(mine) if flat else mine


@_lower(ops.AllToAll)
def all_to_all(e: Emitter, op: ops.AllToAll) -> Lowered:
    """DistCollective, between a Transpose from `split` and one to `concat`."""
    group_size, shape = _group_size(e, op), op.x.type.shape
    split, join = op.split % len(shape), op.concat % len(shape)
    size = exact_divide(shape[split], group_size)
    assert size is not None  # the operation's types say so
    shard = (*shape[:split], size, *shape[split + 1 :])
    joined = (shard[0] * group_size, *shard[1:])
    shards = _shards_from(e, e.get(op.x), group_size, shard, split)
    return _shards_to(e, _collective(e, op, shards, joined, joined), group_size, shard, join)


def _shards_from(e: Emitter, x: str, group_size: int, shard: Shape, dim: int) -> str:
    """`x`, which holds shards of this shape along `dim`, with them one after the other instead."""
    if not dim:
        return x
    before, rest = product(shard[:dim]), product(shard[dim:])
    if before != 1:
        x = e.add("Transpose", e.reshape(x, (before, group_size, rest)), perm=[1, 0, 2])
    return e.reshape(x, (shard[0] * group_size, *shard[1:]))


def _shards_to(e: Emitter, x: str, group_size: int, shard: Shape, dim: int) -> str:
    """The inverse: shards that come one after the other, joined along `dim`."""
    if not dim:
        return x
    before, rest = product(shard[:dim]), product(shard[dim:])
    if before != 1:
        x = e.add("Transpose", e.reshape(x, (group_size, before, rest)), perm=[1, 0, 2])
    return e.reshape(x, (*shard[:dim], shard[dim] * group_size, *shard[dim + 1 :]))


@TABLE.lower(ops.Rank)
def rank(e: Emitter, op: ops.Rank) -> Lowered:
    """A named constant, to which per_rank.py gives each rank's value."""
    graph = e.graph
    for name, axes in graph.positions.items():
        if axes == op.axes:
            return name
    name = graph.fresh(f"rank.{op.axis}")
    graph.initializers[name] = TensorProto(name=name)
    graph.positions[name] = op.axes
    return name
