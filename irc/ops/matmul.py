"""Matrix products. In 16-bit floats they accumulate in f32."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import Error
from ..ir.core import Op
from ..ir.declare import Operand, OptionalOperand, operation, optional
from ..ir.types import TensorType
from .shapes import broadcast, float_operand, number_operand, same_dtype, shape_text


@operation("matmul", sharding="... m k, ... k n -> ... m n", sums="x | y", reads="many")
class Matmul(Op):
    """x [..., M, K] times y [..., K, N] is [..., M, N]; leading dimensions broadcast."""

    x: Operand
    y: Operand

    def infer(self) -> TensorType:
        x, y = self.x.type.shape, self.y.type.shape
        kind = same_dtype(self.opname, self.x, self.y)
        number_operand(self.opname, self.x)
        if len(x) < 2 or len(y) < 2:
            raise Error(
                f"matmul: both operands need two dimensions, not {shape_text(x)} "
                f"and {shape_text(y)}; unsqueeze adds one"
            )
        if x[-1] != y[-2]:
            raise Error(
                f"matmul: {shape_text(x)} times {shape_text(y)} sums over {x[-1]} against {y[-2]}"
            )
        return TensorType(kind, (*broadcast(x[:-2], y[:-2]), x[-2], y[-1]))

    @np.errstate(all="ignore")
    def evaluate(self, x: Any, y: Any) -> Any:
        return np.matmul(x, y)


@operation(
    "linear",
    sharding="... k, n k, n -> ... n",
    sums="x bias | weight bias",
    addends="bias",
    reads="many",
)
class Linear(Op):
    """x [..., K] times the transpose of weight [N, K], plus bias [N], is [..., N].

    The weight is stored as Hugging Face checkpoints store it: one row per output.
    """

    x: Operand
    weight: Operand
    bias: OptionalOperand = optional()

    def infer(self) -> TensorType:
        x, weight = self.x.type.shape, self.weight.type.shape
        float_operand(self.opname, self.x)
        if len(weight) != 2:
            raise Error(f"linear: the weight is [out, in], not {shape_text(weight)}")
        if not x or x[-1] != weight[1]:
            raise Error(
                f"linear: x is {shape_text(x)}, but the weight {shape_text(weight)} "
                f"takes {weight[1]} inputs"
            )
        values = [self.x, self.weight]
        if self.bias is not None:
            values.append(self.bias)
            if self.bias.type.shape != weight[:1]:
                raise Error(
                    f"linear: the bias is {shape_text(self.bias.type.shape)}, but the "
                    f"weight {shape_text(weight)} gives {weight[0]} outputs"
                )
        return TensorType(same_dtype(self.opname, *values), (*x[:-1], weight[0]))

    @np.errstate(all="ignore")
    def evaluate(self, x: Any, weight: Any, bias: Any = None) -> Any:
        product = np.matmul(x, weight.T)
        return product if bias is None else product + bias
