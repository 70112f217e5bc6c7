"""Activation functions, one float at a time; none overflows in between."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from ..ir.core import Op
from ..ir.declare import operation
from .control import Full
from .elementwise import Add, FloatUnary, Mul
from .functions import Erf, erf


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) without overflow: the exponent is never positive."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


@operation("sigmoid", bounded="always")
class Sigmoid(FloatUnary):
    """1 / (1 + exp(-x))."""

    @np.errstate(under="ignore")
    def evaluate(self, x: Any) -> Any:
        return sigmoid(x)


@operation("tanh", keeps_zeros=True, bounded="always")
class Tanh(FloatUnary):
    """The hyperbolic tangent."""

    ufunc = np.tanh


@operation("relu", keeps_zeros=True, bounded="operands")
class Relu(FloatUnary):
    """x where it is positive, else 0; NaN stays NaN."""

    def evaluate(self, x: Any) -> Any:
        return np.maximum(x, 0)


@operation("softplus", bounded="operands")
class Softplus(FloatUnary):
    """log(1 + exp(x))."""

    @np.errstate(under="ignore")
    def evaluate(self, x: Any) -> Any:
        return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@operation("silu", keeps_zeros=True, bounded="operands")
class Silu(FloatUnary):
    """x * sigmoid(x), also called swish (Elfwing et al., 2017)."""

    def expand(self) -> Op:
        return Mul(self.x, Sigmoid(self.x))

    @np.errstate(under="ignore")
    def evaluate(self, x: Any) -> Any:
        return x * sigmoid(x)


@operation("quick_gelu", keeps_zeros=True, bounded="operands")
class QuickGelu(FloatUnary):
    """x * sigmoid(1.702 x), the approximation of gelu that CLIP uses."""

    def expand(self) -> Op:
        return Mul(self.x, Sigmoid(Mul(self.x, Full(value=1.702, dtype=self.x.type.dtype))))

    @np.errstate(under="ignore")
    def evaluate(self, x: Any) -> Any:
        return x * sigmoid(1.702 * x)


@operation("squared_relu", keeps_zeros=True)
class SquaredRelu(FloatUnary):
    """relu(x) squared (So et al., 2021)."""

    def expand(self) -> Op:
        positive = Relu(self.x)
        return Mul(positive, positive)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return np.square(np.maximum(x, 0))


@operation("gelu", keeps_zeros=True, bounded="operands")
class Gelu(FloatUnary):
    """x * P(a standard normal number <= x) (Hendrycks and Gimpel, 2016).

    `approximate="none"` is x/2 * (1 + erf(x / sqrt 2)); `"tanh"` is the paper's
    x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).
    """

    approximate: Literal["none", "tanh"] = "none"

    def expand(self) -> Op:
        kind = self.x.type.dtype

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
