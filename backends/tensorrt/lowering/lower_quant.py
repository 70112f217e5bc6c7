"""Quantized weights for TensorRT."""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.lower_quant import dequantize, scales_refusal
from irc.backends.tensorrt.lowering.table import BUILDER, CHOICES
from irc.core import Op, Weight


def _refusal(op: Op) -> str | None:
    """What TensorRT cannot take: zero points, and four bits that are no constant."""
    assert isinstance(op, ops.Dequantize)
    if op.zero is not None:
        return "has zero points, and TensorRT's scales are symmetric; move the values around 0"
    if op.x.type.dtype == "i4" and not isinstance(op.x, Weight):
        return "takes i4 that is no weight, and TensorRT has i4 in constants only"
    return scales_refusal(op)


def _constant(op: Op) -> bool:
    """Whether x may be cast by nothing: TensorRT has it as a constant, or not at all."""
    return isinstance(op.operands[0], Weight) or op.operands[0].type.dtype != "i8"


CHOICES.lower(
    ops.Dequantize,
    choice="DequantizeLinear",
    reason="one kernel with the product behind it, for blocks of i4 constants along the sum and "
    "for a scale per tensor or row of i8 and f8e4m3",
    source=BUILDER,
    unless=_refusal,
    takes=("i4", "f8e4m3"),
    alone=_constant,
)(dequantize)
