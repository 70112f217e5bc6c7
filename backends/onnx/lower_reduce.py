"""Reductions and scans as ONNX nodes."""

from __future__ import annotations

import math

import numpy as np

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Lowered
from irc.backends.onnx.kernels import signed
from irc.backends.onnx.lower_elementwise import apply, ordered
from irc.ir.core import Value
from irc.ir.dims import Dim, DimLike, bind, product
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import integer_range, is_float, largest
from irc.onnx_format.operators import DIRECT, PARTIAL, REDUCTIONS
from irc.ops.reduce import Reduction


def _reduced(e: Emitter, op: Reduction) -> str:
    """One node."""
    row = REDUCTIONS[type(op)]
    dims, attributes = e.ints(*op.dims), row.to_onnx(op)
    return apply(e, row.kind, op.x.type.dtype, [e.get(op.x)], dims, **attributes)


@TABLE.lower(ops.ReduceSum)
def reduce_sum(e: Emitter, op: ops.ReduceSum) -> Lowered:
    """ReduceSum, of i64 for all integers: that of ONNX Runtime 1.31 adds i32 up to the largest."""
    dtype, dims = op.x.type.dtype, e.ints(*op.dims)
    if _is_size(op):
        return e.add("Squeeze", e.dim(op.x.type.shape[0]), e.ints(0))
    if is_float(dtype) or "ReduceSum" not in e.missing:
        return _reduced(e, op)
    x = e.cast64(op.x)
    if _is_large(op.x):
        total = _sum_of_halves(e, x, dims, op.keep)
    else:
        total = e.add("ReduceSum", x, dims, keepdims=int(op.keep))
    return total if dtype == "i64" else e.cast(total, e.dtype(dtype))


@TABLE.lower(ops.ReduceMean)
def reduce_mean(e: Emitter, op: ops.ReduceMean) -> Lowered:
    """ReduceMean; NaN of nothing, where ONNX Runtime 1.32 has 0."""
    mean, count = _reduced(e, op), product(tuple(op.x.type.shape[dim] for dim in op.dims))
    if not _may_be_0(e, count):
        return mean
    empty = e.add("Squeeze", e.add("Equal", e.dim(count), e.ints(0)), e.ints(0))
    return e.add("Where", empty, e.number(math.nan, op.x.type.dtype), mean)


@TABLE.lower(ops.ReduceMax, ops.ReduceMin)
def reduce_extreme(e: Emitter, op: ops.ReduceMax | ops.ReduceMin) -> Lowered:
    """ReduceMax or ReduceMin; NaN where there is one."""
    dtype = op.x.type.dtype
    if dtype in _SORTED:
        return _first_of_sorted(e, op, largest=isinstance(op, ops.ReduceMax))
    extreme = _reduced(e, op)
    if not is_float(dtype) or e.reduces_nan:
        return extreme
    absolute = e.add("ReduceL1", e.get(op.x), e.ints(*op.dims), keepdims=int(op.keep))
    return e.add("Where", e.add("IsNaN", absolute), absolute, extreme)


@TABLE.lower(ops.ReduceProd)
def reduce_prod(e: Emitter, op: ops.ReduceProd) -> Lowered:
    """ReduceProd; of integers ScatterElements, along every dimension in turn.

    ONNX Runtime 1.31 multiplies i64 as f64 in ReduceProd, and i32 up to the largest.
    """
    x, shape, dtype = e.get(op.x), list(op.x.type.shape), op.x.type.dtype
    if is_float(dtype) or "ReduceProd" not in e.missing:
        return _reduced(e, op)
    for dim in op.dims:
        first = e.filled(0, tuple(shape), "i64")
        shape[dim] = 1
        ones = e.filled(1, tuple(shape), dtype)
        x = e.add("ScatterElements", ones, first, x, axis=dim, reduction="mul")
    return x if op.keep else e.reshape(x, op.result.type.shape)


def _may_be_0(e: Emitter, size: DimLike) -> bool:
    if not isinstance(size, Dim):
        return size == 0
    falls = any(factor < 0 for symbols, factor in size.terms if symbols)
    least = bind(size, {name: e.module.dims.get(name, (0,))[0] for name in size.symbols()})
    return falls or least == 0


def _is_large(x: Value) -> bool:
    """Whether a sum of i64 may need more bits than f64 has: not of converted narrower integers."""
    producer = x.producer
    source = producer.x.type.dtype if isinstance(producer, ops.Cast) else x.type.dtype
    wide = is_float(source) or dtype_called(source).bits > 32
    return x.type.dtype in ("i64", "u64") and wide


def _sum_of_halves(e: Emitter, x: str, dims: str, keep: bool) -> str:
    """The sum of i64 by the sums of its high and low 32 bits: ONNX Runtime 1.31 adds f64."""
    half = e.number(1 << 32, "i64")
    low = e.add("Mod", x, half)
    parts = low, e.add("Div", e.add("Sub", x, low), half)
    low, high = (e.add("ReduceSum", part, dims, keepdims=int(keep)) for part in parts)
    return e.add("Add", e.add("Mul", high, half), low)


def _is_size(op: ops.ReduceSum) -> bool:
    """Whether an operation counts the ones of a vector: a size as data, known without kernels."""
    ones, type = op.x.producer, op.x.type
    is_ones = isinstance(ones, ops.Full) and ones.value == 1
    return is_ones and type.dtype == "i64" and type.ndim == 1 and not op.keep


# Dtypes without ReduceMax and ReduceMin. ONNX Runtime 1.31 has them for i64, and compares by the
# low 32 bits where the high ones are equal; TopK is right.
_SORTED = ("i64", "i16", "i4", "u64", "u32", "u16", "u4")


def _first_of_sorted(e: Emitter, op: Reduction, largest: bool) -> str:
    """The extreme integer along every dimension in turn.

    One element is added, for dimensions that may be empty.
    """
    kind, ndim, one = op.x.type.dtype, op.x.type.ndim, e.ints(1)
    x = ordered(e, e.get(op.x), kind)
    low, high = integer_range("i64" if kind == "u64" else kind)
    worst = e.number(low if largest else high, signed(kind))
    for dim in op.dims:
        at = dim % ndim
        ends = e.ints(*[0] * (ndim + at), 1, *[0] * (ndim - 1 - at))
        x = e.add("Pad", x, ends, worst)
        x, _ = e.graph.several(2, "TopK", x, one, axis=at, largest=int(largest))
    x = x if op.keep else e.add("Squeeze", x, e.ints(*[dim % ndim for dim in op.dims]))
    x = x if kind == "i64" else e.cast(x, e.dtype(kind))
    return e.add("Add", x, e.number(1 << 63, kind)) if kind == "u64" else x


@TABLE.lower(ops.Argmax)
def argmax(e: Emitter, op: ops.Argmax) -> Lowered:
    """ArgMax; the first NaN where there is one."""
    x, attributes = e.get(op.x), PARTIAL[ops.Argmax].to_onnx(op)
    kind = e.dtype(op.x)
    x = ordered(e, x, kind) if kind in e.missing.get("ArgMax", ()) else x
    largest = e.add("ArgMax", x, **attributes)
    if is_float(op.x.type.dtype) and not e.reduces_nan:
        absolute = e.add("ReduceL1", x, e.ints(op.dim), keepdims=attributes["keepdims"])
        first = e.add("ArgMax", e.cast(e.add("IsNaN", x), "i32"), **attributes)
        largest = e.add("Where", e.add("IsNaN", absolute), first, largest)
    return e.cast(largest, "i32")


@TABLE.lower(ops.Topk)
def topk(e: Emitter, op: ops.Topk) -> Lowered:
    """TopK; on ONNX Runtime of keys, which are signed, and of which NaN has the largest."""
    x, attributes, kind = e.get(op.x), PARTIAL[ops.Topk].to_onnx(op), e.dtype(op.x)
    if kind in e.missing.get("TopK", ()):
        keys = ordered(e, x, kind)
    elif e.reduces_nan or not is_float(kind):
        values, places = e.graph.several(2, "TopK", x, e.dim(op.k), **attributes)
        return values, e.cast(places, "i32")
    else:
        finite = e.add("Min", x, e.number(largest(kind), kind))
        keys = e.add("Where", e.add("IsNaN", x), e.number(np.inf, kind), finite)
    _, places = e.graph.several(2, "TopK", keys, e.dim(op.k), **attributes)
    values = e.add("GatherElements", x, places, axis=attributes["axis"])
    return values, e.cast(places, "i32")


@TABLE.lower(ops.Cumsum)
def cumsum(e: Emitter, op: ops.Cumsum) -> Lowered:
    """CumSum."""
    axis = e.number(op.dim % op.x.type.ndim, "i64")
    row = PARTIAL[ops.Cumsum]
    return apply(e, row.kind, op.x.type.dtype, [e.get(op.x)], axis, **row.to_onnx(op))


@TABLE.lower(ops.Softmax, ops.LogSoftmax)
def softmax(e: Emitter, op: ops.Softmax | ops.LogSoftmax) -> Lowered:
    """Softmax or LogSoftmax."""
    row = DIRECT[type(op)]
    if op.dim % op.x.type.ndim == op.x.type.ndim - 1 and e.is_flat(op.x):
        return Flat(e.add(row.kind, e.flat(op.x), axis=-1))
    return apply(e, row.kind, op.x.type.dtype, [e.get(op.x)], **row.to_onnx(op))
