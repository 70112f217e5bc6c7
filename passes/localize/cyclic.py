"""Lookups in tables that are dealt out: which ids go where, and the way back of their rows.

An id of row i is for rank i % N, where it is row i // N. Per rank there is a queue of `capacity`
ids; the place of an id in its queue is the number of ids before it with the same owner. What has no
place in the queues is written behind them, each to an element of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from irc.core import Op, Value
from irc.dims import DimLike, product
from irc.errors import Error
from irc.layouts import local_dim, local_shape, uneven
from irc.ops import (
    Add,
    AllGather,
    AllReduce,
    AllToAll,
    And,
    Cast,
    Cumsum,
    CyclicEmbedding,
    Embedding,
    Eq,
    FloorDiv,
    Full,
    Gather,
    Ge,
    Iota,
    Lt,
    Mul,
    Not,
    OneHot,
    Pad,
    ReduceSum,
    Reshape,
    ScatterElements,
    Slice,
    Sub,
    Transpose,
    Where,
)

from .builder import Builder


class Queued(NamedTuple):
    """Per id [queues, ids of each]: is it a row's, that row on its owner, the owner, the place."""

    known: Value
    row: Value
    owner: Value
    slot: Value
    fits: Value


def cyclic_embedding(builder: Builder, op: Op) -> tuple[Value, ...]:
    """Rows by way of their owners, and the count of ids without room."""
    assert isinstance(op, CyclicEmbedding)
    ids = _real(builder, op)
    shape = local_shape(op.results[0].type, builder.mesh)
    if op.scatter >= 0:
        ids = _by_destination(builder, ids, op.scatter, op.parts)
    else:
        ids = builder.add(Reshape(ids, shape=(1, product(ids.type.shape))))
    queued = _queued(builder, op, ids)
    room: DimLike = op.capacity or ids.type.shape[1]
    if op.split is not None:
        rows = _by_request(builder, op, queued, room)
    elif op.scatter >= 0:
        rows = _by_owner(builder, op, queued, room)
    else:
        rows = _to_all(builder, op, queued, room)
    rows = builder.add(Reshape(rows, shape=shape))
    return rows, _overflow(builder, op, queued)


def _real(builder: Builder, op: CyclicEmbedding) -> Value:
    """The ids of this rank, -1 in place of padding."""
    ids = builder.local(op.ids)
    for dim, (size, axes) in enumerate(zip(op.ids.type.shape, op.ids.type.axes, strict=True)):
        if axes and isinstance(size, int) and uneven(size, builder.mesh.ways(axes)):
            ids = builder.masked(ids, dim, size, axes, -1)
    return ids


def _by_destination(builder: Builder, ids: Value, dim: int, ways: int) -> Value:
    """Ids [ways, ids of a rank]: those whose rows each rank wants, which has a part of `dim`."""
    shape = ids.type.shape
    part = local_dim(shape[dim], ways)
    missing = part * ways - shape[dim]
    if missing != 0:
        after = tuple(missing if i == dim else 0 for i in range(len(shape)))
        ids = builder.add(Pad(ids, before=(0,) * len(shape), after=after, value=-1))
    ids = builder.add(Reshape(ids, shape=(*shape[:dim], ways, part, *shape[dim + 1 :])))
    order = (dim, *(i for i in range(len(shape) + 1) if i != dim))
    ids = builder.add(Transpose(ids, order=order)) if dim else ids
    return builder.add(Reshape(ids, shape=(ways, product(ids.type.shape[1:]))))


def _queued(builder: Builder, op: CyclicEmbedding, ids: Value) -> Queued:
    kind = ids.type.dtype
    parts, zero = builder.constant(op.parts, kind), builder.constant(0, kind)
    known = builder.add(Ge(ids, zero))
    if op.rows <= 2**31 - 1 or kind == "i64":
        below = builder.add(Lt(ids, builder.constant(op.rows, kind)))
        known = builder.add(And(known, below))
    some = builder.add(Where(known, ids, zero))
    row = builder.add(FloorDiv(some, parts))
    owner = builder.add(Sub(some, builder.add(Mul(row, parts))))
    row, owner = (_i32(builder, value) for value in (row, owner))
    asked = builder.add(Where(known, owner, builder.constant(-1, "i32")))
    hits = builder.add(OneHot(asked, size=op.parts, dtype="i32"))
    before = builder.add(Cumsum(hits, dim=1, exclusive=True))
    slot = builder.add(ReduceSum(builder.add(Mul(hits, before)), dims=(2,)))
    fits = known
    if op.capacity:
        free = builder.add(Lt(slot, builder.constant(op.capacity, "i32")))
        fits = builder.add(And(known, free))
    return Queued(known, row, owner, slot, fits)


def _i32(builder: Builder, value: Value) -> Value:
    return value if value.type.dtype == "i32" else builder.add(Cast(value, dtype="i32"))


def _by_request(builder: Builder, op: CyclicEmbedding, queued: Queued, room: DimLike) -> Value:
    """Every rank sends its ids to their owners and gets the rows back, in the same places."""
    place = _places(builder, queued.owner, queued.slot, room)
    keys = _queues(builder, op, place, queued.row, queued.fits, room * op.parts)
    keys = builder.add(AllToAll(keys, axis=op.axis, split=0, concat=0, ways=op.parts))
    rows = _look_up(builder, op, keys)
    rows = builder.add(AllToAll(rows, axis=op.axis, split=0, concat=0, ways=op.parts))
    return _picked(builder, rows, place, queued.fits)


def _by_owner(builder: Builder, op: CyclicEmbedding, queued: Queued, room: DimLike) -> Value:
    """All know all ids, so that owners send every rank the rows of its part unasked."""
    rank = builder.rank(op.axes)
    mine = builder.add(And(queued.fits, builder.add(Eq(queued.owner, rank))))
    receiver = builder.add(Reshape(builder.add(Iota(size=op.parts)), shape=(op.parts, 1)))
    target = _places(builder, receiver, queued.slot, room)
    keys = _queues(builder, op, target, queued.row, mine, room * op.parts)
    rows = _look_up(builder, op, keys)
    rows = builder.add(AllToAll(rows, axis=op.axis, split=0, concat=0, ways=op.parts))
    owner, slot, fits = (
        builder.add(Gather(value, rank, dim=0))
        for value in (queued.owner, queued.slot, queued.fits)
    )
    return _picked(builder, rows, _places(builder, owner, slot, room), fits)


def _to_all(builder: Builder, op: CyclicEmbedding, queued: Queued, room: DimLike) -> Value:
    """Owners send their rows, closed up, to everyone."""
    own = builder.add(Eq(queued.owner, builder.rank(op.axes)))
    mine = builder.add(And(queued.fits, own))
    keys = _queues(builder, op, queued.slot, queued.row, mine, room)
    rows = _look_up(builder, op, keys)
    rows = builder.add(AllGather(rows, axis=op.axis, dim=0, ways=op.parts))
    return _picked(builder, rows, _places(builder, queued.owner, queued.slot, room), queued.fits)


def _places(builder: Builder, queue: Value, slot: Value, room: DimLike) -> Value:
    """Where a slot of a queue lies when the queues stand one behind the other."""
    return builder.add(Add(builder.add(Mul(queue, builder.size(room))), slot))


def _queues(
    builder: Builder, op: CyclicEmbedding, place: Value, row: Value, fits: Value, total: DimLike
) -> Value:
    """i32 [total]: every row that fits in its place, the row of zeros where there is none."""
    count = product(row.type.shape)
    numbers = builder.add(Iota(size=total + count))
    behind = builder.add(Slice(numbers, dim=0, start=total, stop=total + count))
    place, row, fits = (builder.add(Reshape(value, shape=(count,))) for value in (place, row, fits))
    target = builder.add(Where(fits, place, behind))
    empty = builder.add(Full(value=_zeros(builder, op), shape=(total + count,), dtype="i32"))
    filled = builder.add(ScatterElements(empty, target, row, dim=0))
    return builder.add(Slice(filled, dim=0, start=0, stop=total))


def _zeros(builder: Builder, op: CyclicEmbedding) -> int:
    zeros = builder.zeros.get(op.table)
    if zeros is None:
        raise Error("cyclic_embedding has to be the only use of its table, which is a weight")
    return zeros


def _look_up(builder: Builder, op: CyclicEmbedding, keys: Value) -> Value:
    return builder.add(Embedding(keys, builder.local(op.table), inside=True))


def _picked(builder: Builder, rows: Value, place: Value, fits: Value) -> Value:
    """[ids, D]: the row at the place of every id, zeros where it has none."""
    index = builder.add(Where(fits, place, builder.constant(-1, "i32")))
    index = builder.add(Reshape(index, shape=(product(index.type.shape),)))
    return builder.add(Embedding(index, rows))


def _overflow(builder: Builder, op: CyclicEmbedding, queued: Queued) -> Value:
    """How many ids of all ranks found no room."""
    if not op.capacity:
        return builder.constant(0, "i32")
    lost = builder.add(And(queued.known, builder.add(Not(queued.fits))))
    count = builder.add(ReduceSum(builder.add(Cast(lost, dtype="i32")), dims=(0, 1)))
    split = {axis for axes in op.ids.type.axes for axis in axes}
    over = tuple(axis for axis in builder.mesh.names if axis in split)
    ways = builder.mesh.ways(over)
    if ways == 1:
        return count
    return builder.add(AllReduce(count, axis=".".join(over), ways=ways))
