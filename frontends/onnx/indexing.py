"""Rows, slices and elements by index: embedding, gather, scatter.

A negative index counts from the end, in ONNX as in gather. The ids of an embedding do not: a lookup
in a table of the file is an embedding where they are inputs, or computed of these without a minus.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, Content, ImportedValue, Node, sizes
from irc.frontends.onnx.fold import below, content_of
from irc.frontends.onnx.rules import Results, imports, row_rule
from irc.ir.core import Value, Weight
from irc.ir.dims import Dim, DimLike, Shape, product
from irc.onnx_format.operators import DIRECT


@imports("Gather", attributes="axis")
def gather(b: Builder, node: Node) -> Results:
    """Slices by index; an embedding where x is a table of the file, and no index is negative."""
    x, indices = node.shaped(0, 1), node.input(1)
    axis = node.axis(x.ndim, 0)
    content = content_of(indices)
    if content is not None:
        part = _by_content(b, x, axis, content)
        if part is not None:
            return part
    is_table = axis == 0 and x.ndim == 2 and isinstance(b.get(x), Weight)
    if is_table and _from_front(b, b.get(indices)):
        return b.op(ops.Embedding, indices, x, inside=True)
    return b.op(ops.Gather, x, indices, dim=axis)


_COUNTS = (ops.Iota, ops.Argmax, ops.Abs)  # of which none is negative
_KEEP_SIGN = (ops.Add, ops.Mul, ops.FloorDiv, ops.Minimum, ops.Cumsum, ops.ReduceSum, ops.ReduceMax)


def _from_front(b: Builder, ids: Value) -> bool:
    """Whether ids are arguments, or computed such that none is negative if no argument is."""
    stack, seen = [ids], set[Value]()
    while stack:
        value = stack.pop()
        if value in seen or value.type.dtype == "bool":
            continue
        seen.add(value)
        needed = _needed(b, value)
        if needed is None:
            return False
        stack.extend(needed)
    return True


def _needed(b: Builder, value: Value) -> Sequence[Value] | None:
    """The values on whose signs that of a value depends; None where it may be negative anyway."""
    op = value.producer
    match op:
        case None:
            numbers = b.data[value].read() if isinstance(value, Weight) else np.zeros(1)
            return None if numbers is None or numbers.min(initial=0) < 0 else ()
        case ops.Constant():
            return () if min(op.values) >= 0 else None
        case ops.Full():
            return () if op.value >= 0 else None
        case ops.Mod():
            return (op.y,)
        case ops.Topk():
            return () if value is op.results[1] else op.operands
        case ops.Where():
            return (op.x, op.y)
        case ops.Clip():
            return () if op.low is not None and op.low >= 0 else op.operands
        case _:
            if isinstance(op, _COUNTS):
                return ()
            return op.operands if op.moves_data or isinstance(op, _KEEP_SIGN) else None


def _by_content(b: Builder, x: ImportedValue, at: int, content: Content) -> ImportedValue | None:
    """One slice that is known while reading, or several that count from the end."""
    size = x.shape[at]
    if content.ndim or isinstance(content.item(), float):
        indices = _counted(content, size)
        return None if indices.content is content else b.op(ops.Gather, x, indices, dim=at)
    place = content.item()
    if not isinstance(place, Dim) and place < 0:
        place = size + place
    if below(place, 0) or below(size, place + 1):
        raise Error(f"Gather of index {place} in a dimension of {size}")
    part = b.op(ops.Slice, x, dim=at, start=place, stop=place + 1)
    return b.reshaped(part, (*x.shape[:at], *x.shape[at + 1 :]))


def _counted(content: Content, size: DimLike) -> ImportedValue:
    """Known indices, those from the end counted from the front; the same content if all are."""
    if not all(isinstance(n, (int, Dim)) for n in content.flat):
        raise Error("indices that are not integers; expected i32 or i64")
    if not all(isinstance(n, Dim) or n >= 0 for n in content.flat):
        places = [n if isinstance(n, Dim) or n >= 0 else size + n for n in content.flat]
        content = sizes(*places).reshape(content.shape)
    return ImportedValue("i64", content.shape, content=content)


@imports("GatherElements", "ScatterElements", attributes="axis reduction")
def elements(b: Builder, node: Node) -> Results:
    """Elements by index along one dimension, read or written."""
    cls = ops.GatherElements if node.kind == "GatherElements" else ops.ScatterElements
    x, content = node.shaped(0, 1), content_of(node.input(1))
    if content is not None:
        node.inputs[1] = _counted(content, x.shape[node.axis(x.ndim, 0)])
    return row_rule(cls, DIRECT[cls])(b, node)


@imports("ReverseSequence", attributes="batch_axis time_axis")
def reverse_sequence(b: Builder, node: Node) -> Results:
    """The first elements of each row in reverse order, as many as its length."""
    x, time = node.shaped(0, 2), node.integer("time_axis", 0)
    if {time, node.integer("batch_axis", 1)} != {0, 1}:
        raise Error("ReverseSequence takes batch_axis and time_axis 0 and 1, or 1 and 0")
    steps = b.op(ops.Iota, size=x.shape[time], dtype="i64")
    places = b.op(ops.Unsqueeze, steps, dims=(1 - time,))
    lengths = b.op(ops.Unsqueeze, b.cast(node.shaped(1, 1, 1), "i64"), dims=(time,))
    turned = lengths - 1 - places
    places = b.where(turned >= 0, turned, places)
    places = b.reshaped(places, (*x.shape[:2], *(1,) * (x.ndim - 2)))
    return b.op(ops.GatherElements, x, b.op(ops.Expand, places, shape=x.shape), dim=time)


@imports("GatherND", attributes="batch_dims")
def gather_nd(b: Builder, node: Node) -> Results:
    """Slices by one or several leading indices, which are joined into one index.

    All slices in their order, as in the masks of transformers, are those by the last index alone: a
    Gather, which TensorRT joins with what surrounds it, as it does not join the cast of a mask.
    """
    x, indices = node.input(0), node.shaped(1, 1)
    along = None if node.integer("batch_dims", 0) else _in_order(b.get(indices), x.shape)
    if along is None:
        flat, place, _ = _slices(b, node)
        return b.op(ops.Gather, flat, place, dim=0)
    kept = [n if i in along else 1 for i, n in enumerate(indices.shape[:-1])]
    rest, last = x.shape[len(along) :], len(along) - 1
    count = b.op(ops.Iota, size=x.shape[last], dtype="i64")
    slices = b.reshaped(b.op(ops.Gather, x, count, dim=last), (*kept, *rest))
    return b.op(ops.Expand, slices, shape=(*indices.shape[:-1], *rest))


def _in_order(indices: Value, shape: Shape) -> list[int] | None:
    """The dimensions of indices along which their columns count through the dimensions of a shape,
    one after the other; None where they do not."""
    op, dims = indices.producer, list[int]()
    if not isinstance(op, ops.Concat) or op.dim % indices.type.ndim != indices.type.ndim - 1:
        return None
    for column, size in zip(op.values, shape, strict=False):
        dim = _counting(column, size)
        if dim is None or (dims and dim <= dims[-1]):
            return None
        dims.append(dim)
    return dims if len(dims) == len(op.values) == indices.type.shape[-1] else None


def _counting(value: Value, size: DimLike) -> int | None:
    """The dimension along which a value counts from 0 to size - 1, the same along all others."""
    op, ndim = value.producer, value.type.ndim
    if isinstance(op, ops.Iota):
        return 0 if op.size == size else None
    if not isinstance(op, (ops.Unsqueeze, ops.Expand)):
        return None
    dim = _counting(op.x, size)
    if dim is None:
        return None
    if isinstance(op, ops.Unsqueeze):
        return [i for i in range(ndim) if i not in [new % ndim for new in op.dims]][dim]
    dim += ndim - op.x.type.ndim
    return dim if value.type.shape[dim] == size else None


@imports("ScatterND", attributes="reduction")
def scatter_nd(b: Builder, node: Node) -> Results:
    """Slices are written as rows, each index repeated along its row."""
    flat, place, rest = _slices(b, node)
    count, width, updates = product(place.shape), product(rest), node.input(2)
    if updates.shape != (*place.shape, *rest):
        raise Error(f"this ScatterND has updates {list(updates.shape)}, which do not fit")
    flat = b.op(ops.Reshape, flat, shape=(flat.shape[0], width))
    column = b.op(ops.Reshape, place, shape=(count, 1))
    places = b.op(ops.Expand, column, shape=(count, width))
    updates = b.op(ops.Reshape, updates, shape=(count, width))
    words = {"reduction": node.text("reduction", "none")}
    rows = b.op(ops.ScatterElements, flat, places, updates, dim=0, **words)
    return b.reshaped(rows, node.input(0).shape)


def _slices(b: Builder, node: Node) -> tuple[ImportedValue, ImportedValue, Shape]:
    """(the slices of x in one leading dimension, places in it, the shape of a slice)."""
    x, indices = node.input(0), node.shaped(1, 1)
    depth = indices.shape[-1]
    if node.integer("batch_dims", 0) or isinstance(depth, Dim) or not 0 < depth <= x.ndim:
        raise Error(f"this {node.kind} has batch dimensions or an unknown depth")
    columns = b.cast(indices, "i64") if indices.dtype == "i32" else indices
    place = _place(b, columns, x.shape[0], 0)
    for i in range(1, depth):
        place = place * x.shape[i]
        place = place + _place(b, columns, x.shape[i], i)
    shape = (product(x.shape[:depth]), *x.shape[depth:])
    return b.op(ops.Reshape, x, shape=shape), place, x.shape[depth:]


def _place(b: Builder, columns: ImportedValue, size: DimLike, at: int) -> ImportedValue:
    """One of the indices, counted from the front."""
    column = b.op(ops.Slice, columns, dim=-1, start=at, stop=at + 1)
    column = b.op(ops.Squeeze, column, dims=(-1,))
    wrapped = column < 0
    return b.where(wrapped, column + size, column)
