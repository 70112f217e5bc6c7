"""`FakeQuantize`: a value rounded to what codes and scales represent, as products take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.core import Op, Value
from ..ops import Clip, Dequantize, DynamicScale, Full, Quantize


@dataclass(frozen=True)
class FakeQuantize:
    """How a value is quantized to codes of `dtype` and dequantized at once.

    `scale` is static, of the whole tensor, with `zero` as the code of 0. Without it every call
    computes scales of dtype `scales`: one per token if `block` is 0, else one per block of that
    many features. `tensor_scale` is the second level of NVFP4. `clamp` are limits (low, high) to
    which values are clipped before.
    """

    dtype: str
    scale: float | None = None
    zero: int = 0
    block: int = 0
    scales: str = "f32"
    tensor_scale: float | None = None
    clamp: tuple[float, ...] = ()

    def apply(self, x: Value, before: Op) -> Value:
        """x, quantized and dequantized in front of an operation."""
        dtype: Any = self.dtype
        kind: Any = x.type.dtype
        if self.clamp:
            x = result_before(Clip(x, low=self.clamp[0], high=self.clamp[1]), before, x.name)
        scale = self._scale(x, before)
        zero = constant(self.zero, x.type.ndim, before, self.dtype) if self.zero else None
        codes = result_before(Quantize(x, scale, zero=zero, dtype=dtype), before, "codes")
        name = f"{x.name}_{self.dtype}" if x.name else None
        return result_before(Dequantize(codes, scale, zero=zero, dtype=kind), before, name)

    def _scale(self, x: Value, before: Op) -> Value:
        if self.scale is not None:
            return constant(self.scale, x.type.ndim, before)
        options: Any = {"dtype": self.dtype, "block": self.block, "scale": self.scales}
        if self.tensor_scale is None:
            return result_before(DynamicScale(x, **options), before, "scales")
        whole = constant(self.tensor_scale, x.type.ndim, before)
        found = result_before(DynamicScale(x, tensor_scale=whole, **options), before, "scales")
        return result_before(Dequantize(found, whole, dtype="f32"), before, "scales")


def constant(value: float, ndim: int, before: Op, dtype: str = "f32") -> Value:
    """One number for a complete tensor of `ndim` dimensions."""
    return result_before(Full(value=value, shape=(1,) * ndim, dtype=dtype), before)


def result_before(op: Op, before: Op, name: str | None = None) -> Value:
    """The result of a new operation, put in front of another one."""
    assert before.parent is not None
    before.parent.insert(op, before)
    op.loc, op.result.name = before.loc, name
    return op.result
