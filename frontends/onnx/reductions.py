"""Reductions, the places of the largest, the k largest, running sums, and norms along axes."""

from __future__ import annotations

import math

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.elementwise import scalar
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.reshaping import axes_of, single, written_axes
from irc.frontends.onnx.rules import Made, reads
from irc.frontends.onnx.structure import diagonal
from irc.ir.core import Op
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import is_float
from irc.onnx_format.operators import PARTIAL, REDUCTIONS

_REDUCE: dict[str, type[Op]] = {row.kind: cls for cls, row in REDUCTIONS.items()}


@reads(*_REDUCE, "ReduceLogSumExp", known="axes keepdims noop_with_empty_axes")
def reduction(b: Builder, node: Node) -> Made:
    x, keep = node.input(0), bool(node.integer("keepdims", 1))
    dims = axes_of(node, x.ndim)
    if not dims and not node.integer("noop_with_empty_axes", 0):
        dims = list(range(x.ndim))
    places = tuple(written_axes(node) or dims or ())  # counted from either end, as the file has it

    def reduced(cls: type[Op], entry: Entry) -> Entry:
        return b.op(cls, entry, dims=places, keep=keep) if places else entry

    match node.kind:
        case "ReduceLogSumExp":
            return _log_sum_exp(b, x, places, keep) if places else x
        case "ReduceMax" | "ReduceMin" if x.dtype == "bool":
            largest = reduced(_REDUCE[node.kind], b.cast(x, "i32"))
            return b.op(ops.Gt, largest, b.number(0, "i32"))  # of nothing: an end of i32
        case "ReduceMean" if not is_float(x.dtype):
            raise Error(f"ReduceMean of {x.dtype} has no operation in irc; cast to f32")
        case _:
            return reduced(_REDUCE[node.kind], x)


def _log_sum_exp(b: Builder, x: Entry, dims: tuple[int, ...], keep: bool) -> Entry:
    """The largest number is taken off first, so that nothing overflows."""
    if not is_float(x.dtype):
        raise Error(f"ReduceLogSumExp of {x.dtype} has no operation in irc; cast to f32")
    top = b.op(ops.ReduceMax, x, dims=dims, keep=True)
    infinite = b.op(ops.Eq, b.op(ops.Abs, top), math.inf)
    top = b.where(infinite, 0, top)
    total = b.op(ops.ReduceSum, b.op(ops.Exp, b.op(ops.Sub, x, top)), dims=dims, keep=keep)
    return b.op(ops.Add, b.op(ops.Log, total), b.reshaped(b.get(top), total.shape))


@reads("ArgMax", "ArgMin", known="axis keepdims select_last_index")
def argmax(b: Builder, node: Node) -> Made:
    """The index i64 of the first or the last of the largest or smallest numbers."""
    x = node.input(0)
    x = x if node.kind == "ArgMax" else _reversed_order(b, x)
    words = PARTIAL[ops.Argmax].to_irc(node.attributes)
    axis = node.axis(x.ndim, 0)
    if not node.integer("select_last_index", 0):
        return b.cast(b.op(ops.Argmax, x, **words), "i64")
    found = b.cast(b.op(ops.Argmax, b.op(ops.Flip, x, dims=(axis,)), **words), "i64")
    return b.op(ops.Sub, b.entry(b.number(x.shape[axis] - 1, "i64")), found)


def _reversed_order(b: Builder, x: Entry) -> Entry:
    """Numbers in the opposite order; reversed once more they are what they were."""
    kind = dtype_called(x.dtype)
    if kind.is_float:
        return b.op(ops.Neg, x)
    last = (1 << kind.bits) - 1 if kind.kind == "uint" else -1  # none overflows
    return b.op(ops.Sub, b.entry(b.number(last, x.dtype)), x)


@reads("TopK", known="axis largest sorted")
def topk(b: Builder, node: Node) -> Made:
    x, smallest = node.input(0), not node.integer("largest", 1)
    x = _reversed_order(b, x) if smallest else x
    words = PARTIAL[ops.Topk].to_irc(node.attributes)
    op = b.add(ops.Topk(b.get(x), k=single(node, 1, "k"), **words))
    values, places = (b.entry(value) for value in op.results)
    return [_reversed_order(b, values) if smallest else values, b.cast(places, "i64")]


@reads("CumSum", "CumProd", known="exclusive reverse")
def running(b: Builder, node: Node) -> Made:
    """Sums or products of all elements up to each place."""
    x, along = node.shaped(0, 1), _sums if node.kind == "CumSum" else _products
    axis = scalar(node.input(1))
    if axis is not None:
        if not -x.ndim <= int(axis) < x.ndim:
            raise Error(f"{node.kind} along axis {axis} of {x.ndim} dimensions")
        return along(b, node, x, int(axis) % x.ndim)
    # an axis that the data name: the sums along all of them, of which that one is taken
    named = b.op(ops.Mod, b.reshaped(b.get(node.input(1)), ()), x.ndim)
    result = along(b, node, x, 0)
    for i in range(1, x.ndim):
        result = b.where(b.op(ops.Eq, named, i), along(b, node, x, i), result)
    return result


def _sums(b: Builder, node: Node, x: Entry, axis: int) -> Entry:
    backwards = bool(node.integer("reverse", 0))
    x = b.op(ops.Flip, x, dims=(axis,)) if backwards else x
    x = b.op(ops.Cumsum, x, dim=axis, **PARTIAL[ops.Cumsum].to_irc(node.attributes))
    return b.op(ops.Flip, x, dims=(axis,)) if backwards else x


def _products(b: Builder, node: Node, x: Entry, axis: int) -> Entry:
    """The product over a new dimension, of x where a place counts, else of 1."""
    orders: list[type[Op]] = [ops.Le, ops.Lt, ops.Ge, ops.Gt]
    order = orders[2 * bool(node.integer("reverse", 0)) + bool(node.integer("exclusive", 0))]
    size = x.shape[axis]
    counts = b.get(diagonal(b, size, size, 0, order))
    counts = b.reshaped(counts, (size, size, *(1,) * (x.ndim - axis - 1)))
    many = b.where(counts, b.op(ops.Unsqueeze, x, dims=(axis,)), 1)
    return b.op(ops.ReduceProd, many, dims=(axis + 1,))


@reads("GlobalAveragePool", "GlobalMaxPool")
def global_pool(b: Builder, node: Node) -> Made:
    x = node.shaped(0, 2)
    cls = ops.ReduceMean if node.kind == "GlobalAveragePool" else ops.ReduceMax
    dims = tuple(range(2, x.ndim))
    return b.op(cls, x, dims=dims, keep=True) if dims else x
