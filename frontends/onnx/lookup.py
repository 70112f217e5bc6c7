"""Rows and slices by index: embedding and gather.

An index of ONNX may count from the end. Known ones are turned; those that are computed are taken to
count from the front, as all exporters of embeddings write them, and a negative one is an error
where the reference runs the module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from irc import ops
from irc.core import Value
from irc.dims import Dim, DimLike, Shape, product
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.elementwise import scalar
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import below, content_of
from irc.frontends.onnx.reshaping import made_by as source
from irc.frontends.onnx.rules import Made, reads
from irc.frontends.onnx.tensors import Data


@reads("Gather", known="axis")
def gather(b: Builder, node: Node) -> Made:
    x, indices = node.input(0), node.input(1)
    axis = node.integer("axis", 0)
    if not -x.rank <= axis < x.rank:
        raise Error(f"Gather along axis {axis} of {x.rank} dimensions")
    content = content_of(indices)
    if content is not None and not (node.own and node.final):
        found = _known(b, x, axis % x.rank, content)
        if found is not None:
            return found
    places = b.get(_narrow(indices, node))
    if _reads_rows(node, x, axis):
        return b.value(ops.Embedding(places, b.get(x), inside=True))
    return b.value(ops.Gather(b.get(x), places, dim=axis))


def _reads_rows(node: Node, x: Entry, axis: int) -> bool:
    """Whether a Gather is an embedding: of rows of a matrix of the file."""
    if axis % x.rank or x.rank != 2 or (node.own and node.opname == "gather"):
        return False
    weight = x.data is not None or (x.was is not None and x.was.data is not None)
    return weight or node.opname == "embedding"


def _known(b: Builder, x: Entry, at: int, content: np.ndarray) -> Entry | None:
    """One slice that is known while reading."""
    size = x.shape[at]
    if content.ndim or isinstance(content.item(), float):
        return _turned(b, x, at, content)
    place = content.item()
    if not isinstance(place, Dim) and place < 0:
        place = size + place
    if below(place, 0) or below(size, place + 1):
        raise Error(f"Gather of place {place} in a dimension of {size}")
    one = b.value(ops.Slice(b.get(x), dim=at, start=place, stop=place + 1))
    return b.viewed(one, (*x.shape[:at], *x.shape[at + 1 :]))


def _turned(b: Builder, x: Entry, at: int, content: np.ndarray) -> Entry | None:
    """Several known places, those from the end counted from the front."""
    size = x.shape[at]
    if any(isinstance(n, Dim) for n in content.flat) or not content.size:
        return None
    if all(n >= 0 for n in content.flat):
        return None
    places = np.array([size + n if n < 0 else n for n in content.flat], object)
    indices = b.constant(places.reshape(content.shape), "i64", content.shape)
    return b.entry(b.value(ops.Gather(b.get(x), indices, dim=at)))


def _narrow(indices: Entry, node: Node) -> Entry:
    """Indices before a cast to a wider integer, which no index needs."""
    was = indices.was
    if was is not None and was.dtype == "i32" and indices.value is None:
        return was
    return indices


def guarded_rows(b: Builder, node: Node) -> Entry | None:
    """Rows at ids, zeros for ids outside: how our own emission writes an embedding.

    Where(Unsqueeze(ids == known), Gather(table, known), 0), known = Min(Max(ids, 0), last).
    """
    rows, zero = node.input(1), scalar(node.input(2))
    taken, equal = _gathered(rows), _compared(node.input(0))
    if taken is None or equal is None or zero != 0:
        return None
    table, known = taken.input(0), taken.input(1)
    ids = equal.input(0)
    least = source(known, "Min")
    most = source(least.input(0), "Max") if least is not None else None
    if least is None or most is None or most.input(0) is not ids or equal.input(1) is not known:
        return None
    last = scalar(least.input(1))
    if scalar(most.input(1)) != 0 or table.rank != 2 or last is None:
        return None
    if last != table.shape[0] - 1 or taken.integer("axis", 0) or ids.dtype not in ("i32", "i64"):
        return None
    if rows.dtype != table.dtype:  # the table is stored narrow, and cast where it is read
        if table.data is None:
            return None
        data: Data = table.data
        value = b.tensor(data, rows.dtype)
    else:
        value = b.get(table)
    return b.entry(b.value(ops.Embedding(b.get(ids), value)))


def _gathered(rows: Entry) -> Node | None:
    """The Gather behind rows, through a cast of them."""
    cast = source(rows, "Cast")
    return source(cast.input(0) if cast is not None else rows, "Gather")


def _compared(condition: Entry) -> Node | None:
    unsqueeze = source(condition, "Unsqueeze")
    return source(unsqueeze.input(0), "Equal") if unsqueeze is not None else None


@reads("GatherND", known="batch_dims")
def gather_nd(b: Builder, node: Node) -> Made:
    """Whole slices by one or several leading indices, which are joined into one."""
    flat, place, _ = _slices(b, node)
    return b.value(ops.Gather(flat, place, dim=0))


@reads("ScatterND", known="reduction")
def scatter_nd(b: Builder, node: Node) -> Made:
    """Whole slices are put in: the slices are rows, and each index stands for all of a row."""
    flat, place, rest = _slices(b, node)
    how: Any = node.text("reduction", "none")
    shape, count, width = node.input(0).shape, product(place.type.shape), product(rest)
    if node.input(2).shape != (*place.type.shape, *rest):
        raise Error(f"this ScatterND has updates {list(node.input(2).shape)}, which do not fit")
    flat = b.value(ops.Reshape(flat, shape=(flat.type.shape[0], width)))
    column = b.value(ops.Reshape(place, shape=(count, 1)))
    places = b.value(ops.Expand(column, shape=(count, width)))
    updates = b.value(ops.Reshape(b.get(node.input(2)), shape=(count, width)))
    found = b.value(ops.ScatterElements(flat, places, updates, dim=0, reduction=how))
    return b.viewed(found, shape)


def _slices(b: Builder, node: Node) -> tuple[Value, Value, Shape]:
    """(the slices of x by leading dimensions in one row, places in it, the shape of a slice)."""
    x, indices = node.input(0), node.shaped(1, 1)
    depth = indices.shape[-1]
    if node.integer("batch_dims", 0) or isinstance(depth, Dim) or not 0 < depth <= x.rank:
        raise Error(f"this {node.kind} has batch dimensions or an unknown depth")
    columns = b.get(indices)
    if columns.type.dtype == "i32":
        columns = b.value(ops.Cast(columns, dtype="i64"))
    place = _place(b, columns, x.shape[0], 0)
    for i in range(1, depth):
        length = b.constant(np.array(x.shape[i], object), "i64", ())
        place = b.value(ops.Mul(place, length))
        place = b.value(ops.Add(place, _place(b, columns, x.shape[i], i)))
    shape = (product(x.shape[:depth]), *x.shape[depth:])
    return b.value(ops.Reshape(b.get(x), shape=shape)), place, x.shape[depth:]


def _place(b: Builder, columns: Value, size: DimLike, at: int) -> Value:
    """One of the indices, counted from the front."""
    column = b.value(ops.Slice(columns, dim=-1, start=at, stop=at + 1))
    column = b.value(ops.Squeeze(column, dims=(-1,)))
    wrapped = b.value(ops.Lt(column, b.number(0, "i64")))
    length = b.constant(np.array(size, object), "i64", ())
    return b.value(ops.Where(wrapped, b.value(ops.Add(column, length)), column))
