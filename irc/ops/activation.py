"""Activation functions, one float at a time; none overflows in between."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from ..core import Op
from ..declare import Operand, operation
from .control import Full
from .elementwise import Add, FloatUnary, Mul
from .functions import Erf, erf
from .shapes import float_operand


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) without overflow: the exponent is never positive."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


@operation("sigmoid", sharding="... -> ...")
class Sigmoid(FloatUnary):
    """1 / (1 + exp(-x))."""

    x: Operand

    @np.errstate(under="ignore")
    def evaluate(self, x: Any) -> Any:
        return sigmoid(x)


@operation("tanh", sharding="... -> ...")
class Tanh(FloatUnary):
    """The hyperbolic tangent."""

    x: Operand
    ufunc = np.tanh


@operation("relu", sharding="... -> ...")
class Relu(FloatUnary):
    """x where it is positive, else 0; NaN stays NaN."""

    x: Operand

    def evaluate(self, x: Any) -> Any:
        return np.maximum(x, 0)


@operation("softplus", sharding="... -> ...")
class Softplus(FloatUnary):
    """log(1 + exp(x))."""

    x: Operand

    @np.errstate(under="ignore")
    def evaluate(self, x: Any) -> Any:
        return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@operation("silu", sharding="... -> ...")
class Silu(Op):
    """x * sigmoid(x), also called swish (Elfwing et al., 2017)."""

    x: Operand

    def expand(self) -> Op:
        float_operand(self.opname, self.x)
        return Mul(self.x, Sigmoid(self.x))

    @np.errstate(under="ignore")
    def evaluate(self, x: Any) -> Any:
        return x * sigmoid(x)


@operation("quick_gelu", sharding="... -> ...")
class QuickGelu(Op):
    """x * sigmoid(1.702 x), the approximation of gelu that CLIP uses."""

    x: Operand

    def expand(self) -> Op:
        kind = float_operand(self.opname, self.x)
        return Mul(self.x, Sigmoid(Mul(self.x, Full(value=1.702, dtype=kind.dtype))))

    @np.errstate(under="ignore")
    def evaluate(self, x: Any) -> Any:
        return x * sigmoid(1.702 * x)


@operation("squared_relu", sharding="... -> ...")
class SquaredRelu(Op):
    """relu(x) squared (So et al., 2021)."""

    x: Operand

    def expand(self) -> Op:
        float_operand(self.opname, self.x)
        positive = Relu(self.x)
        return Mul(positive, positive)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return np.square(np.maximum(x, 0))


@operation("gelu", sharding="... -> ...")
class Gelu(Op):
    """x * P(a standard normal number <= x) (Hendrycks and Gimpel, 2016).

    `approximate="none"` is x/2 * (1 + erf(x / sqrt 2)); `"tanh"` is the paper's
    x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).
    """

    x: Operand
    approximate: Literal["none", "tanh"] = "none"

    def expand(self) -> Op:
        kind = float_operand(self.opname, self.x).dtype

        def times(value: Op | Any, factor: float) -> Op:
            return Mul(value, Full(value=factor, dtype=kind))

        if self.approximate == "none":
            inner = Erf(times(self.x, math.sqrt(0.5)))
        else:
            cube = Mul(Mul(self.x, self.x), self.x)
            inner = Tanh(times(Add(self.x, times(cube, 0.044715)), math.sqrt(2 / math.pi)))
        return Mul(times(self.x, 0.5), Add(inner, Full(value=1.0, dtype=kind)))

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        if self.approximate == "none":
            return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
