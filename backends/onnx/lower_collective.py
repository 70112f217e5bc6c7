"""Collectives as DistCollective nodes, which work along dimension 0.

That dimension may be any that is outermost in memory: where a collective works along another one,
a single Transpose moves the parts of all ranks to the front, or from there to where they belong.
"""

from __future__ import annotations

from onnx.onnx_ml_pb2 import TensorProto

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Lowered
from irc.backends.onnx.graph import value_info
from irc.core import Value
from irc.dims import Shape, exact_divide, product
from irc.ops.collective import Exchange

OPERATIONS: dict[type[Exchange], str] = {
    ops.AllReduce: "all_reduce",
    ops.AllGather: "all_gather",
    ops.ReduceScatter: "reduce_scatter",
    ops.AllToAll: "all_to_all",
    ops.Broadcast: "broadcast",
    ops.Reduce: "reduce",
    ops.CollectiveGather: "gather",
    ops.CollectiveScatter: "scatter",
}


def _ways(e: Emitter, op: Exchange) -> int:
    return e.module.mesh.ways(op.axes)


def _same(e: Emitter, x: Value) -> Lowered:
    """What a group of one rank gets: its own operand."""
    return Flat(e.flat(x)) if e.is_flat(x) else e.get(x)


def _collective(e: Emitter, op: Exchange, x: str, before: Shape, after: Shape) -> str:
    """A node on `x`, whose shapes before and after are these."""
    kind, ways = e.dtype(op.x), _ways(e, op)
    if e.graph.now(x) in e.graph.initializers:
        x = e.add("Identity", x)
    name = e.collective(op, OPERATIONS[type(op)], ways, x)
    for each, shape in ((x, before), (name, after)):
        e.graph.values.setdefault(each, value_info(each, kind, shape))
    return name


@TABLE.lower(ops.AllReduce, ops.Broadcast, ops.Reduce)
def alike(e: Emitter, op: Exchange) -> Lowered:
    """Elementwise: any layout will do."""
    if _ways(e, op) == 1:
        return _same(e, op.x)
    shape = op.x.type.shape
    if not e.is_flat(op.x):
        return _collective(e, op, e.get(op.x), shape, shape)
    matrix = (product(shape[:-1]), shape[-1])
    return Flat(_collective(e, op, e.flat(op.x), matrix, matrix))


@TABLE.lower(ops.AllGather, ops.CollectiveGather)
def gather(e: Emitter, op: ops.AllGather | ops.CollectiveGather) -> Lowered:
    """The parts arrive one after the other."""
    ways = _ways(e, op)
    if ways == 1:
        return _same(e, op.x)
    x, part, dim, flat = e.get, op.x.type.shape, op.dim % op.x.type.rank, False
    if dim and dim == len(part) - 1:
        x, part, dim, flat = e.flat, (product(part[:-1]), part[-1]), 1, True
    joined = _collective(e, op, x(op.x), part, (part[0] * ways, *part[1:]))
    joined = _parts_to(e, joined, ways, part, dim)
    return Flat(joined) if flat else joined


@TABLE.lower(ops.ReduceScatter, ops.CollectiveScatter)
def scatter(e: Emitter, op: ops.ReduceScatter | ops.CollectiveScatter) -> Lowered:
    """The parts leave one after the other."""
    ways = _ways(e, op)
    if ways == 1:
        return _same(e, op.x)
    x, part, dim, flat = e.get, op.result.type.shape, op.dim % op.x.type.rank, False
    if dim and dim == len(part) - 1:
        x, part, dim, flat = e.flat, (product(part[:-1]), part[-1]), 1, True
    parts = _parts_from(e, x(op.x), ways, part, dim)
    mine = _collective(e, op, parts, (part[0] * ways, *part[1:]), part)
    return Flat(mine) if flat else mine


@TABLE.lower(ops.AllToAll)
def all_to_all(e: Emitter, op: ops.AllToAll) -> Lowered:
    """Part j leaves for rank j; what arrives is joined along another dimension."""
    ways, shape = _ways(e, op), op.x.type.shape
    if ways == 1:
        return _same(e, op.x)
    split, join = op.split % len(shape), op.concat % len(shape)
    size = exact_divide(shape[split], ways)
    assert size is not None  # the operation's types say so
    part = (*shape[:split], size, *shape[split + 1 :])
    whole = (part[0] * ways, *part[1:])
    parts = _parts_from(e, e.get(op.x), ways, part, split)
    return _parts_to(e, _collective(e, op, parts, whole, whole), ways, part, join)


def _parts_from(e: Emitter, x: str, ways: int, part: Shape, dim: int) -> str:
    """`x`, which holds parts of this shape along `dim`, with them one after the other instead."""
    if not dim:
        return x
    before, rest = product(part[:dim]), product(part[dim:])
    if before != 1:
        x = e.add("Transpose", e.reshape(x, (before, ways, rest)), perm=[1, 0, 2])
    return e.reshape(x, (part[0] * ways, *part[1:]))


def _parts_to(e: Emitter, x: str, ways: int, part: Shape, dim: int) -> str:
    """The inverse: parts that come one after the other, joined along `dim`."""
    if not dim:
        return x
    before, rest = product(part[:dim]), product(part[dim:])
    if before != 1:
        x = e.add("Transpose", e.reshape(x, (ways, before, rest)), perm=[1, 0, 2])
    return e.reshape(x, (*part[:dim], part[dim] * ways, *part[dim + 1 :]))


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
