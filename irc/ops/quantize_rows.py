"""Quantization of rows by their own scales when the model runs, as one operation."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..ir.core import Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, optional
from ..ir.facts import Bound
from .norm import RmsNorm
from .quant import Dequantize, DynamicScale, Quantize


@operation("quantize_rows", sharding="... k!, k -> ... k, ... 1, ... k")
class QuantizeRows(Op):
    """Codes of rows, the scale of each, and the numbers that the codes stand for.

    x [..., K] gives codes [..., K], scales [..., 1] of dtype `scale` as dynamic_scale has them, and
    numbers [..., K] of `dtype`. With `weight` [K] it is rms_norm(x, weight) that is quantized, with
    its `eps` and `offset`.
    """

    x: Operand
    weight: OptionalOperand = optional()
    codes: Literal["i4", "i8", "f8e4m3", "f8e5m2", "f4e2m1"] = "f8e4m3"
    scale: Literal["f32", "f16", "bf16", "f8e8m0"] = "f32"
    dtype: Literal["f32", "f16", "bf16"] = "f32"
    eps: float = 1e-6
    offset: float = 0.0

    def bound(self, result: int) -> Bound:
        """Codes are; scales and numbers may overflow."""
        return "always" if result == 0 else "no"

    def expand(self) -> tuple[Value, ...]:
        x = self.x
        if self.weight is not None:
            x = RmsNorm(x, self.weight, eps=self.eps, offset=self.offset).result
        scale = DynamicScale(x, dtype=self.codes, scale=self.scale).result
        codes = Quantize(x, scale, dtype=self.codes).result
        return codes, scale, Dequantize(codes, scale, dtype=self.dtype).result


class Codes(NamedTuple):
    """Codes, and the scale that makes them numbers."""

    codes: Value
    scale: Value


def codes_of(numbers: Value) -> Codes | None:
    """The codes of numbers that are products of codes and scales; None for any others."""
    op = numbers.producer
    if isinstance(op, Dequantize) and op.zero is None:
        return Codes(op.x, op.scale)
    if isinstance(op, QuantizeRows) and numbers is op.results[2]:
        return Codes(*op.results[:2])
    return None
