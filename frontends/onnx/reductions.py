"""Reductions, the largest, and reading and writing by index."""

from __future__ import annotations

import math

from irc import ops
from irc.core import Op, Value
from irc.dtypes import dtype as dtype_called
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.elementwise import apply
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.reshaping import axes_of, single
from irc.frontends.onnx.rules import Made, only, reads

_REDUCE: dict[str, type[Op]] = {
    "ReduceSum": ops.ReduceSum,
    "ReduceMean": ops.ReduceMean,
    "ReduceMax": ops.ReduceMax,
    "ReduceMin": ops.ReduceMin,
    "ReduceProd": ops.ReduceProd,
}
_DERIVED = ("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp")


@reads(*_REDUCE, *_DERIVED, known="axes keepdims noop_with_empty_axes")
def reduction(b: Builder, node: Node) -> Made:
    x, keep = node.input(0), bool(node.integer("keepdims", 1))
    dims = axes_of(node, x.rank)
    if not dims and node.integer("noop_with_empty_axes", 0):
        return x
    dims = dims or list(range(x.rank))
    if not dims:
        return x

    def reduced(cls: type[Op], entry: Entry) -> Entry:
        return b.entry(b.value(cls(b.get(entry), dims=_written(node, dims), keep=keep)))

    match node.kind:
        case "ReduceSumSquare" | "ReduceL2":
            found = reduced(ops.ReduceSum, apply(b, ops.Mul, x, x))
            return found if node.kind == "ReduceSumSquare" else apply(b, ops.Sqrt, found)
        case "ReduceL1":
            return reduced(ops.ReduceSum, apply(b, ops.Abs, x))
        case "ReduceLogSum":
            return apply(b, ops.Log, reduced(ops.ReduceSum, x))
        case "ReduceLogSumExp":
            return _log_sum_exp(b, x, dims, keep)
        case _:
            return reduced(_REDUCE[node.kind], x)


def _log_sum_exp(b: Builder, x: Entry, dims: list[int], keep: bool) -> Entry:
    """The largest number is taken off first, so that nothing overflows."""
    if not dtype_called(x.dtype).is_float:
        raise Error(f"ReduceLogSumExp of {x.dtype} has no operation in irc; cast to f32")
    top = b.entry(b.value(ops.ReduceMax(b.get(x), dims=tuple(dims), keep=True)))
    infinite = apply(b, ops.Eq, apply(b, ops.Abs, top), b.entry(b.number(math.inf, x.dtype)))
    top = apply(b, ops.Where, infinite, b.entry(b.number(0, x.dtype)), top)
    parts = apply(b, ops.Exp, apply(b, ops.Sub, x, top))
    total = b.entry(b.value(ops.ReduceSum(b.get(parts), dims=tuple(dims), keep=keep)))
    return apply(b, ops.Add, apply(b, ops.Log, total), b.viewed(b.get(top), total.shape))


def _written(node: Node, dims: list[int]) -> tuple[int, ...]:
    """The dimensions as the file writes them, from either end, where that is known."""
    given = node.ints("axes")
    if given is None and node.has(1):
        from irc.frontends.onnx.fold import content_of

        content = content_of(node.input(1))
        given = None if content is None or not content.size else content.reshape(-1).tolist()
    return tuple(given or dims)


@reads("ArgMax", known="axis keepdims select_last_index", refuses=only("select_last_index", 0))
def argmax(b: Builder, node: Node) -> Made:
    x, dim = b.get(node.input(0)), node.integer("axis", 0)
    return _places(b, b.value(ops.Argmax(x, dim=dim, keep=bool(node.integer("keepdims", 1)))))


@reads("ArgMin", known="axis keepdims select_last_index", refuses=only("select_last_index", 0))
def argmin(b: Builder, node: Node) -> Made:
    x, dim = b.get(_turned(b, node.input(0))), node.integer("axis", 0)
    return _places(b, b.value(ops.Argmax(x, dim=dim, keep=bool(node.integer("keepdims", 1)))))


def _places(b: Builder, found: Value) -> Entry:
    """i32 places as the i64 that ONNX has, made only where that is needed."""
    narrow = b.entry(found)
    return Entry(
        "i64",
        found.type.shape,
        make=lambda: b.value(ops.Cast(found, dtype="i64")),
        was=narrow,
    )


def _turned(b: Builder, x: Entry) -> Entry:
    """Numbers in the opposite order; turned once more they are what they were."""
    kind = dtype_called(x.dtype)
    if kind.is_float:
        return apply(b, ops.Neg, x)
    last = (1 << kind.bits) - 1 if kind.kind == "uint" else -1  # none overflows
    return apply(b, ops.Sub, b.entry(b.number(last, x.dtype)), x)


@reads("TopK", known="axis largest sorted")
def topk(b: Builder, node: Node) -> Made:
    x, smallest = node.input(0), not node.integer("largest", 1)
    x = _turned(b, x) if smallest else x
    op = b.add(ops.Topk(b.get(x), k=single(node, 1, "k"), dim=node.integer("axis", -1)))
    values, places = b.entry(op.results[0]), _places(b, op.results[1])
    return [_turned(b, values) if smallest else values, places]


@reads("GatherElements", known="axis")
def gather_elements(b: Builder, node: Node) -> Made:
    x, indices = b.get(node.input(0)), _indices(node.input(1))
    return b.value(ops.GatherElements(x, b.get(indices), dim=node.integer("axis", 0)))


@reads("ScatterElements", known="axis reduction")
def scatter_elements(b: Builder, node: Node) -> Made:
    x, indices, updates = b.get(node.input(0)), _indices(node.input(1)), b.get(node.input(2))
    how = node.text("reduction", "none")
    dim = node.integer("axis", 0)
    return b.value(
        ops.ScatterElements(x, b.get(indices), updates, dim=dim, reduction=how)  # pyright: ignore[reportArgumentType]
    )


def _indices(entry: Entry) -> Entry:
    """Indices as they were before they were made i64."""
    was = entry.was
    return was if was is not None and was.dtype == "i32" and entry.value is None else entry
