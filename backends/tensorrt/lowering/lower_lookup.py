"""Lookups for TensorRT."""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import Lowered
from irc.backends.onnx.lower_lookup import known_rows
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.core import Op


@CHOICES.lower(
    ops.Embedding,
    choice="Gather",
    reason="a table that is also multiplied is an input of its own, else TensorRT copies it",
    source="activation memory in the builder's log, TensorRT-RTX 1.7.1.116",
)
def embedding(e: TensorRTEmitter, op: ops.Embedding) -> Lowered:
    return known_rows(e, op, lambda ids: _rows(e, op, ids))


def _rows(e: TensorRTEmitter, op: ops.Embedding, ids: str) -> str:
    weight = e.weight(op.table)
    table = e.get(op.table) if weight is None else e.rows(weight)
    return e.add("Gather", table, ids, axis=0)


def plain_scatter(op: Op) -> str | None:
    """Refuses what ScatterElements of TensorRT cannot do."""
    assert isinstance(op, ops.ScatterElements)
    return None if op.reduction == "none" else f"cannot {op.reduction} into what is there"


@CHOICES.lower(
    ops.ScatterElements,
    choice="ScatterElements",
    reason="without a reduction only",
    source="onnx/onnx-tensorrt 5ab48c5c, ScatterElements",
    unless=plain_scatter,
)
def scatter_elements(e: TensorRTEmitter, op: ops.ScatterElements) -> Lowered:
    return e.add("ScatterElements", e.get(op.x), e.get(op.indices), e.get(op.updates), axis=op.dim)
