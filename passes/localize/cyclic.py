"""Lookups in cyclically distributed tables: sends ids to the owners of rows, and rows back.

Row i is on rank i % N, as its row i // N. Per rank there is a queue of `capacity` ids; the slot of
an id in its queue is the number of ids before it with the same owner. Ids without a slot are
written behind the queues, each to an element of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from irc import ops
from irc.errors import Error
from irc.ir.core import Op, Value
from irc.ir.dims import DimLike, Shape, product
from irc.ir.layouts import local_dim, local_shape, uneven

from .builder import Builder


class Queued(NamedTuple):
    """Per id [queues, ids of each]: whether it is in range, its row on its owner, owner, slot, and
    whether it is in range and has a slot."""

    in_range: Value
    row: Value
    owner: Value
    slot: Value
    fits: Value


def cyclic_embedding(builder: Builder, op: Op) -> tuple[Value, ...]:
    """The rows, by way of their owners, and the capacity that the ids need, 0 where they fit."""
    assert isinstance(op, ops.CyclicEmbedding)
    ids = _real(builder, op)
    shape = local_shape(op.results[0].type, builder.mesh)
    if op.scatter >= 0:
        ids = _by_destination(builder, ids, op.scatter, op.parts)
    else:
        ids = builder.own(builder.add(ops.Reshape(ids, shape=(1, product(ids.type.shape)))))
    queued = _queued(builder, op, ids)
    size: DimLike = op.capacity or ids.type.shape[1]
    if op.split is not None:
        rows = _by_request(builder, op, queued, size)
    elif op.scatter >= 0:
        rows = _by_owner(builder, op, queued, size)
    else:
        rows = _to_all(builder, op, queued, size)
    return builder.add(ops.Reshape(rows, shape=shape)), _overflow(builder, op, queued)


def _real(builder: Builder, op: ops.CyclicEmbedding) -> Value:
    """The ids of this rank, -1 in place of padding."""
    ids = builder.local(op.ids)
    for dim, (size, axes) in enumerate(zip(op.ids.type.shape, op.ids.type.axes, strict=True)):
        if axes and isinstance(size, int) and uneven(size, builder.mesh.group_size(axes)):
            ids = builder.masked(ids, dim, size, axes, -1)
    return ids


def _by_destination(builder: Builder, ids: Value, dim: int, group_size: int) -> Value:
    """Ids [group_size, ids of a rank]: those whose rows each rank needs, by shards of `dim`."""
    shape = ids.type.shape
    part = local_dim(shape[dim], group_size)
    ids = builder.padded(ids, dim, part * group_size, -1)
    ids = builder.add(ops.Reshape(ids, shape=(*shape[:dim], group_size, part, *shape[dim + 1 :])))
    order = (dim, *(i for i in range(len(shape) + 1) if i != dim))
    ids = builder.add(ops.Transpose(ids, order=order)) if dim else ids
    queues = ops.Reshape(ids, shape=(group_size, product(ids.type.shape[1:])))
    return builder.own(builder.add(queues))


def _queued(builder: Builder, op: ops.CyclicEmbedding, ids: Value) -> Queued:
    kind = ids.type.dtype
    parts, zero = builder.constant(op.parts, kind), builder.constant(0, kind)
    in_range = builder.add(ops.Ge(ids, zero))
    if op.rows <= 2**31 - 1 or kind == "i64":
        below = ops.Lt(ids, builder.constant(op.rows, kind))
        in_range = builder.add(ops.And(in_range, below))
    some = ops.Where(in_range, ids, zero)
    row = builder.add(ops.FloorDiv(some, parts))
    owner = builder.add(ops.Sub(some, ops.Mul(row, parts)))
    row, owner = (_i32(builder, value) for value in (row, owner))
    hits = ops.Where(in_range, owner, builder.constant(-1, "i32"))
    hits = ops.OneHot(hits, size=op.parts, dtype="i32")
    before = ops.Cumsum(hits, dim=1, exclusive=True)
    slot = builder.add(ops.ReduceSum(ops.Mul(hits, before), dims=(2,)))
    fits = in_range
    if op.capacity:
        free = ops.Lt(slot, builder.constant(op.capacity, "i32"))
        fits = builder.add(ops.And(in_range, free))
    return Queued(in_range, row, owner, slot, fits)


def _i32(builder: Builder, value: Value) -> Value:
    return value if value.type.dtype == "i32" else builder.add(ops.Cast(value, dtype="i32"))


def _by_request(builder: Builder, op: ops.CyclicEmbedding, queued: Queued, size: DimLike) -> Value:
    """Every rank sends its ids to their owners and gets the rows back, in the same slots.

    Keys and rows are [senders of ids, owners, slots], sharded over the senders, then the owners.
    """
    parts, index = op.parts, _index(builder, queued.owner, queued.slot, size)
    keys = _queues(builder, op, index, queued.row, queued.fits, size * parts)
    keys = _shards(builder, op, keys, (1, parts, size), 0)
    keys = builder.add(ops.AllToAll(keys, axis=op.axis, split=1, concat=0, group_size=parts))
    keys = builder.own(builder.add(ops.Reshape(keys, shape=(parts * size,))))
    rows = builder.add(ops.Embedding(keys, builder.local(op.table), inside=True))
    rows = _shards(builder, op, rows, (parts, 1, size, rows.type.shape[1]), 1)
    rows = builder.add(ops.AllToAll(rows, axis=op.axis, split=0, concat=1, group_size=parts))
    return _picked(builder, _in_one_row(builder, rows), index, queued.fits)


def _by_owner(builder: Builder, op: ops.CyclicEmbedding, queued: Queued, size: DimLike) -> Value:
    """Every rank has all ids, so owners send every rank the rows of its shard unrequested.

    These are [owners, receivers, slots, D], sharded over the owners, then the receivers.
    """
    rank = builder.rank(op.axes)
    mine = builder.add(ops.And(queued.fits, ops.Eq(queued.owner, rank)))
    receiver = builder.add(ops.Reshape(ops.Iota(size=op.parts), shape=(op.parts, 1)))
    target = _index(builder, receiver, queued.slot, size)
    keys = _queues(builder, op, target, queued.row, mine, size * op.parts)
    rows = builder.add(ops.Embedding(keys, builder.local(op.table), inside=True))
    rows = _shards(builder, op, rows, (1, op.parts, size, rows.type.shape[1]), 0)
    rows = builder.add(ops.AllToAll(rows, axis=op.axis, split=1, concat=0, group_size=op.parts))
    rows = _in_one_row(builder, rows)
    owner, slot, fits = (
        builder.add(ops.Gather(value, rank, dim=0))
        for value in (queued.owner, queued.slot, queued.fits)
    )
    return _picked(builder, rows, _index(builder, owner, slot, size), fits)


def _to_all(builder: Builder, op: ops.CyclicEmbedding, queued: Queued, size: DimLike) -> Value:
    """Owners send their rows, without gaps, to all ranks."""
    own = ops.Eq(queued.owner, builder.rank(op.axes))
    mine = builder.add(ops.And(queued.fits, own))
    keys = _queues(builder, op, queued.slot, queued.row, mine, size)
    rows = ops.Embedding(keys, builder.local(op.table), inside=True)
    rows = builder.add(ops.AllGather(rows, axis=op.axis, dim=0, group_size=op.parts))
    return _picked(builder, rows, _index(builder, queued.owner, queued.slot, size), queued.fits)


def _shards(
    builder: Builder, op: ops.CyclicEmbedding, value: Value, shape: Shape, dim: int
) -> Value:
    """What each rank has of its own, in another shape, as shards along a dimension."""
    value = builder.own(builder.add(ops.Reshape(value, shape=shape)))
    return builder.shards(value, dim, builder.wide(op.axes))


def _in_one_row(builder: Builder, rows: Value) -> Value:
    """[slots of all queues, D]: what each rank got from all others."""
    count = product(rows.type.shape[:-1])
    return builder.own(builder.add(ops.Reshape(rows, shape=(count, rows.type.shape[-1]))))


def _index(builder: Builder, queue: Value, slot: Value, size: DimLike) -> Value:
    """The index of a slot, with the queues of `size` one after the other."""
    return builder.add(ops.Add(ops.Mul(queue, builder.size(size)), slot))


def _queues(
    builder: Builder, op: ops.CyclicEmbedding, index: Value, row: Value, fits: Value, total: DimLike
) -> Value:
    """i32 [total]: the row of every slot, and the row of zeros in empty slots."""
    zeros = builder.zeros.get(op.table)
    if zeros is None:
        raise Error("cyclic_embedding must be the only use of its table, which is a weight")
    count = product(row.type.shape)
    behind = ops.Slice(ops.Iota(size=total + count), dim=0, start=total, stop=total + count)
    builder.add(behind)
    index, row, fits = (builder.add(ops.Reshape(v, shape=(count,))) for v in (index, row, fits))
    target = builder.add(ops.Where(fits, index, behind))
    empty = ops.Full(value=zeros, shape=(total + count,), dtype="i32")
    filled = ops.ScatterElements(empty, target, row, dim=0)
    return builder.add(ops.Slice(filled, dim=0, start=0, stop=total))


def _picked(builder: Builder, rows: Value, index: Value, fits: Value) -> Value:
    """[ids, D]: the row in the slot of every id, zeros where it has none."""
    slots = ops.Where(fits, index, builder.constant(-1, "i32")).result
    slots = ops.Reshape(slots, shape=(product(slots.type.shape),))
    return builder.add(ops.Embedding(slots, rows))


def _overflow(builder: Builder, op: ops.CyclicEmbedding, queued: Queued) -> Value:
    """The capacity that the ids of all ranks need; 0 where it is not more than there is."""
    if not op.capacity:
        return builder.constant(0, "i32")
    one, none = builder.constant(1, "i32"), builder.constant(0, "i32")
    slots = ops.Where(queued.in_range, ops.Add(queued.slot, one), none)
    needed = builder.add(ops.ReduceMax(slots, dims=(1,), keep=True))
    split = {axis for axes in op.ids.type.axes for axis in axes}
    over = tuple(axis for axis in builder.mesh.names if axis in split)
    group_size = builder.mesh.group_size(over)
    if group_size > 1:
        axis = ".".join(over)
        needed = builder.add(ops.AllReduce(needed, axis=axis, op="max", group_size=group_size))
    needed = builder.add(ops.ReduceMax(needed, dims=(0, 1)))
    exceeds = ops.Lt(builder.constant(op.capacity, "i32"), needed)
    return builder.add(ops.Where(exceeds, needed, none))
