"""Reshaping, reordering, slicing, joining, repeating, and access by index as ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Lowered
from irc.backends.onnx.kernels import signed
from irc.backends.onnx.lower_elementwise import apply, select
from irc.ir.core import Value
from irc.ir.dims import LARGEST, Dim, DimLike
from irc.ir.dtypes import is_float
from irc.onnx_format.operators import DIRECT, PARTIAL

_SMALL = ("i16", "i8", "u8", "i4", "u4")
_FIRST = int(np.iinfo(np.int64).min)  # the end of a backward slice that takes the first element


@TABLE.lower(ops.Reshape)
def reshape(e: Emitter, op: ops.Reshape) -> Lowered:
    """Reshape."""
    return e.reshape(e.get(op.x), op.shape)


@TABLE.lower(ops.Expand)
def expand(e: Emitter, op: ops.Expand) -> Lowered:
    """Expand."""
    return e.add("Expand", e.get(op.x), e.sizes(op.shape))


@TABLE.lower(ops.Squeeze, ops.Unsqueeze)
def squeeze(e: Emitter, op: ops.Squeeze | ops.Unsqueeze) -> Lowered:
    """Squeeze or Unsqueeze."""
    return e.add(type(op).__name__, e.get(op.x), e.ints(*op.dims))


@TABLE.lower(ops.Transpose)
def transpose(e: Emitter, op: ops.Transpose) -> Lowered:
    """Transpose."""
    rank = op.x.type.ndim
    return e.add("Transpose", e.get(op.x), perm=[i % rank for i in op.order])


@TABLE.lower(ops.Slice)
def slice_(e: Emitter, op: ops.Slice) -> Lowered:
    """Slice, whose ends are counted from the end of the dimension where that needs no symbol."""
    size = op.x.type.shape[op.dim]
    ends = (_place(e, place, size) for place in (op.start, op.stop))
    return e.add("Slice", e.get(op.x), *ends, e.ints(op.dim), e.ints(op.step))


def _place(e: Emitter, place: DimLike, size: DimLike) -> str:
    """A place in a dimension, i64[1]; one a number before the end is never taken to be below 0."""
    before = size - place
    if isinstance(size, Dim) and not isinstance(before, Dim):
        return e.ints(-before if before > 0 else LARGEST)
    return e.dim(place)


@TABLE.lower(ops.Split)
def split(e: Emitter, op: ops.Split) -> Lowered:
    """Split; the operand itself for one piece."""
    if len(op.sizes) == 1:
        return e.get(op.x)
    attributes = PARTIAL[ops.Split].to_onnx(op)
    return e.graph.several(len(op.sizes), "Split", e.get(op.x), e.sizes(op.sizes), **attributes)


@TABLE.lower(ops.Concat)
def concat(e: Emitter, op: ops.Concat) -> Lowered:
    """Concat."""
    return e.add("Concat", *map(e.get, op.values), **DIRECT[ops.Concat].to_onnx(op))


@TABLE.lower(ops.Flip)
def flip(e: Emitter, op: ops.Flip) -> Lowered:
    """Slice with step -1."""
    count = len(op.dims)
    ends = [e.ints(*[-1] * count), e.ints(*[_FIRST] * count)]
    return e.add("Slice", e.get(op.x), *ends, e.ints(*op.dims), e.ints(*[-1] * count))


@TABLE.lower(ops.Repeat)
def repeat(e: Emitter, op: ops.Repeat) -> Lowered:
    """Unsqueeze, Expand and Reshape."""
    shape = op.x.type.shape
    after = op.dim % len(shape) + 1
    wide = e.add("Unsqueeze", e.get(op.x), e.ints(after))
    wide = e.add("Expand", wide, e.sizes((*shape[:after], op.count, *shape[after:])))
    return e.reshape(wide, op.result.type.shape)


@TABLE.lower(ops.Pad)
def pad(e: Emitter, op: ops.Pad) -> Lowered:
    """Pad; the operand itself without dimensions."""
    if not op.before:
        return e.get(op.x)
    kind = e.dtype(op.x)
    wide = signed(kind) if kind in e.missing.get("Pad", ()) else kind
    sizes, value = e.sizes((*op.before, *op.after)), e.number(op.value, wide)
    return apply(e, "Pad", kind, [e.get(op.x)], sizes, value)


def _indices(e: Emitter, value: Value) -> str:
    """Indices as ONNX takes them, i32 or i64."""
    name = e.get(value)
    return e.cast(name, "i32") if value.type.dtype in _SMALL else name


@TABLE.lower(ops.Embedding)
def embedding(e: Emitter, op: ops.Embedding) -> Lowered:
    """Gather; zeros by Where for ids outside the table."""
    return known_rows(e, op, lambda ids: _rows(e, op.table, ids))


def known_rows(e: Emitter, op: ops.Embedding, rows: Callable[[str], str]) -> Lowered:
    """What `rows` gives for ids inside the table, and zeros for others."""
    ids, kind = _indices(e, op.ids), "i32" if op.ids.type.dtype in _SMALL else op.ids.type.dtype
    if op.inside:
        return rows(ids)
    last = op.table.type.shape[0] - 1
    low = e.number(0, kind)
    if isinstance(last, int):
        high = e.number(last, kind)
    else:
        high = e.cast(e.add("Squeeze", e.dim(last)), kind)
    clipped = e.add("Min", e.add("Max", ids, low), high)
    inside = e.add("Unsqueeze", e.add("Equal", ids, clipped), e.ints(-1))
    kind = op.table.type.dtype
    if op.table.type.shape[1] == 1 and e.dtype(kind) == "f32":
        # ONNX Runtime's Where makes 0 of -0 where the condition has the shape of the features
        ends = e.ints(*[0] * (2 * op.result.type.ndim - 1), 1)
        features = e.add("Pad", rows(clipped), ends)
        return e.add("GatherElements", features, e.cast(e.add("Not", inside), "i64"), axis=-1)
    return select(e, inside, rows(clipped), e.number(0, kind), kind)


def _rows(e: Emitter, table: Value, ids: str) -> str:
    """The rows at ids inside the table. Those of a narrow table are cast after they are read: the
    table itself stays as it is stored."""
    weight = e.weight(table)
    name, stored = (e.get(table), e.dtype(table)) if weight is None else e.stored(weight)
    if stored.startswith("f8"):
        name, stored = e.get(table), e.dtype(table)  # no Gather of 8-bit floats
    rows = e.add("Gather", name, ids, axis=0)
    return rows if stored == e.dtype(table) else e.cast(rows, e.dtype(table))


@TABLE.lower(ops.Gather, ops.GatherElements, ops.ScatterElements)
def by_index(e: Emitter, op: ops.Gather | ops.GatherElements | ops.ScatterElements) -> Lowered:
    """Gather, GatherElements or ScatterElements."""
    row, (x, indices, *updates) = DIRECT[type(op)], op.operands
    names = [e.get(x), _indices(e, indices), *map(e.get, updates)]
    result = e.add(row.kind, *names, **row.to_onnx(op))
    extreme = isinstance(op, ops.ScatterElements) and op.reduction in ("max", "min")
    if not extreme or not is_float(x.type.dtype) or e.reduces_nan:
        return result
    kind = x.type.dtype
    zero, nan = e.number(0, kind), e.number(np.nan, kind)
    old, new = (select(e, e.add("IsNaN", name), nan, zero, kind) for name in names[::2])
    lost = e.add(row.kind, old, names[1], new, **row.to_onnx(op) | {"reduction": "add"})
    return select(e, e.add("IsNaN", lost), lost, result, kind)
