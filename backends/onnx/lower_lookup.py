"""Reading and writing by index as ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable

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
    return known_rows(e, op, lambda ids: _rows(e, op.table, ids))


def known_rows(e: Emitter, op: ops.Embedding, rows: Callable[[str], str]) -> Lowered:
    """What `rows` gives for ids that lie inside the table, and zeros for others."""
    ids, kind = _indices(e, op.ids), "i32" if op.ids.type.dtype in _SMALL else op.ids.type.dtype
    if op.inside:
        return rows(ids)
    last = op.table.type.shape[0] - 1
    low = e.number(0, kind)
    if isinstance(last, int):
        high = e.number(last, kind)
    else:
        high = e.cast(e.add("Squeeze", e.dim(last)), kind)
    known = e.add("Min", e.add("Max", ids, low), high)
    inside = e.add("Unsqueeze", e.add("Equal", ids, known), e.ints(-1))
    kind = op.table.type.dtype
    return select(e, inside, rows(known), e.number(0, kind), kind)


def _rows(e: Emitter, table: Value, ids: str) -> str:
    """The rows at ids that lie inside. Those of a narrow table are cast after they are read: the
    table itself stays as it is stored."""
    weight = e.weight(table)
    name, stored = (e.get(table), e.dtype(table)) if weight is None else e.stored(weight)
    if stored.startswith("f8"):
        name, stored = e.get(table), e.dtype(table)  # no Gather of 8-bit floats
    rows = e.add("Gather", name, ids, axis=0)
    return rows if stored == e.dtype(table) else e.cast(rows, e.dtype(table))


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
