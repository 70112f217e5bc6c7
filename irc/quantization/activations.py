"""Values quantized and dequantized at once: codes of an activation, as later products take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.core import Op, Value
from ..ops import Dequantize, DynamicScale, Full, Quantize


@dataclass(frozen=True)
class Activation:
    """How an input of products is quantized, to codes of `dtype`.

    `scale` is static, of the whole tensor, with `zero` as the code of 0. Without it every call
    computes scales of dtype `scales`: one per token if `block` is 0, else one per block of that
    many features. `tensor_scale` is the second level of NVFP4.
    """

    dtype: str
    scale: float | None = None
    zero: int = 0
    block: int = 0
    scales: str = "f32"
    tensor_scale: float | None = None

    def apply(self, x: Value, before: Op) -> Value:
        """x, rounded to what codes and scales represent; in front of an operation."""
        dtype: Any = self.dtype
        kind: Any = x.type.dtype
        scale = self._scale(x, before)
        zero = _number(self.zero, self.dtype, x, before) if self.zero else None
        codes = insert_before(Quantize(x, scale, zero=zero, dtype=dtype), before, "codes")
        return insert_before(Dequantize(codes, scale, zero=zero, dtype=kind), before, x.name)

    def _scale(self, x: Value, before: Op) -> Value:
        if self.scale is not None:
            return _number(self.scale, "f32", x, before)
        options: Any = {"dtype": self.dtype, "block": self.block, "scale": self.scales}
        if self.tensor_scale is None:
            return insert_before(DynamicScale(x, **options), before, "scales")
        whole = _number(self.tensor_scale, "f32", x, before)
        found = insert_before(DynamicScale(x, tensor_scale=whole, **options), before, "scales")
        return insert_before(Dequantize(found, whole, dtype="f32"), before, "scales")


def _number(value: float, dtype: str, x: Value, before: Op) -> Value:
    """One number for all of x."""
    shape = (1,) * x.type.ndim
    return insert_before(Full(value=value, shape=shape, dtype=dtype), before, None)


def insert_before(op: Op, before: Op, name: str | None) -> Value:
    """The result of an operation that is put in front of another one."""
    assert before.parent is not None
    before.parent.insert(op, before)
    op.loc, op.result.name = before.loc, name
    return op.result
