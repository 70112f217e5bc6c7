"""Reading and writing by index as ONNX nodes."""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Lowered
from irc.backends.onnx.lower_elementwise import select
from irc.core import Value

_SMALL = ("i16", "i8", "u8", "i4", "u4")


def _indices(e: Emitter, value: Value) -> str:
    """Indices as ONNX takes them, i32 or i64."""
    name = e.get(value)
    return e.cast(name, "i32") if value.type.dtype in _SMALL else name


@TABLE.lower(ops.Embedding)
def embedding(e: Emitter, op: ops.Embedding) -> Lowered:
    # Rows of a narrow table are cast after they are read: the table itself stays as it is stored.
    ids, kind = _indices(e, op.ids), "i32" if op.ids.type.dtype in _SMALL else op.ids.type.dtype
    last = op.table.type.shape[0] - 1
    low = e.number(0, kind)
    if isinstance(last, int):
        high = e.number(last, kind)
    else:
        high = e.cast(e.add("Squeeze", e.dim(last)), kind)
    known = e.add("Min", e.add("Max", ids, low), high)
    weight = e.weight(op.table)
    table, stored = (e.get(op.table), e.dtype(op.table)) if weight is None else e.stored(weight)
    if stored.startswith("f8"):
        table, stored = e.get(op.table), e.dtype(op.table)  # no Gather of 8-bit floats
    rows = e.add("Gather", table, known, axis=0)
    rows = rows if stored == e.dtype(op.table) else e.cast(rows, e.dtype(op.table))
    inside = e.add("Unsqueeze", e.add("Equal", ids, known), e.ints(-1))
    kind = op.table.type.dtype
    return select(e, inside, rows, e.number(0, kind), kind)


@TABLE.lower(ops.Gather)
def gather(e: Emitter, op: ops.Gather) -> Lowered:
    return e.add("Gather", e.get(op.x), _indices(e, op.indices), axis=op.dim)


@TABLE.lower(ops.GatherElements)
def gather_elements(e: Emitter, op: ops.GatherElements) -> Lowered:
    return e.add("GatherElements", e.get(op.x), _indices(e, op.indices), axis=op.dim)


@TABLE.lower(ops.ScatterElements)
def scatter_elements(e: Emitter, op: ops.ScatterElements) -> Lowered:
    operands = [e.get(op.x), _indices(e, op.indices), e.get(op.updates)]
    return e.add("ScatterElements", *operands, axis=op.dim, reduction=op.reduction)
