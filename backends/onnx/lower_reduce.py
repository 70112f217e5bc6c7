"""Reductions and scans as ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Lowered
from irc.backends.onnx.lower_elementwise import apply
from irc.core import Op

_KINDS: dict[type[Op], str] = {
    ops.ReduceSum: "ReduceSum",
    ops.ReduceMean: "ReduceMean",
    ops.ReduceMax: "ReduceMax",
    ops.ReduceMin: "ReduceMin",
    ops.ReduceProd: "ReduceProd",
}


def reduction(kind: str) -> Callable[[Emitter, ops.ReduceSum], Lowered]:
    """The lowering of one kind of reduction."""

    def lower(e: Emitter, op: ops.ReduceSum) -> Lowered:
        if op.x.type.dtype == "i64" and kind in ("ReduceMax", "ReduceMin"):
            return _first_of_sorted(e, op, largest=kind == "ReduceMax")
        dims, keep = e.ints(*op.dims), int(op.keep)
        return apply(e, kind, op.x.type.dtype, [e.get(op.x)], dims, keepdims=keep)

    return lower


def _first_of_sorted(e: Emitter, op: ops.ReduceSum, largest: bool) -> str:
    """The extreme i64 along every dimension in turn.

    ONNX Runtime 1.31 compares i64 by the low 32 bits in ReduceMax and ReduceMin where the high ones
    are equal; TopK is right. One element is added, for dimensions that may be empty.
    """
    x, rank, one = e.get(op.x), op.x.type.rank, e.ints(1)
    limits = np.iinfo(np.int64)
    worst = e.number(int(limits.min if largest else limits.max), "i64")
    for dim in op.dims:
        at = dim % rank
        ends = e.ints(*[0] * (rank + at), 1, *[0] * (rank - 1 - at))
        x = e.add("Pad", x, ends, worst)
        x, _ = e.graph.several(2, "TopK", x, one, axis=at, largest=int(largest))
    return x if op.keep else e.add("Squeeze", x, e.ints(*[dim % rank for dim in op.dims]))


for _cls, _kind in _KINDS.items():
    TABLE.lower(_cls)(reduction(_kind))


@TABLE.lower(ops.Argmax)
def argmax(e: Emitter, op: ops.Argmax) -> Lowered:
    x = e.get(op.x)
    x = e.cast(x, "i32") if e.dtype(op.x) in e.missing.get("ArgMax", ()) else x
    return e.cast(e.add("ArgMax", x, axis=op.dim, keepdims=int(op.keep)), "i32")


@TABLE.lower(ops.Topk)
def topk(e: Emitter, op: ops.Topk) -> Lowered:
    values, places = e.graph.several(2, "TopK", e.get(op.x), e.dim(op.k), axis=op.dim)
    return values, e.cast(places, "i32")


@TABLE.lower(ops.Cumsum)
def cumsum(e: Emitter, op: ops.Cumsum) -> Lowered:
    axis = e.number(op.dim % op.x.type.rank, "i64")
    exclusive = int(op.exclusive)
    return apply(e, "CumSum", op.x.type.dtype, [e.get(op.x)], axis, exclusive=exclusive)


@TABLE.lower(ops.Softmax)
def softmax(e: Emitter, op: ops.Softmax) -> Lowered:
    return _along(e, "Softmax", op)


@TABLE.lower(ops.LogSoftmax)
def log_softmax(e: Emitter, op: ops.LogSoftmax) -> Lowered:
    return _along(e, "LogSoftmax", op)


def _along(e: Emitter, kind: str, op: ops.Softmax | ops.LogSoftmax) -> Lowered:
    last = op.dim % op.x.type.rank == op.x.type.rank - 1
    if last and e.is_flat(op.x):
        return Flat(e.add(kind, e.flat(op.x), axis=-1))
    return apply(e, kind, op.x.type.dtype, [e.get(op.x)], axis=op.dim)
