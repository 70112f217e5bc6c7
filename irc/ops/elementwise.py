"""Arithmetic, one element at a time, and the bases of functions of one or two numbers.

Operands of two-operand operations share one dtype and broadcast as in numpy. Integers wrap around
on overflow. Division by zero follows IEEE 754 in floats and is undefined in integers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..attributes import Number
from ..core import Op
from ..declare import Operand, operation
from ..errors import Error
from ..types import TensorType
from .shapes import broadcast, float_operand, number_fits, number_operand, same_dtype


class Binary(Op):
    """Base of the arithmetic on two operands of one dtype, which broadcast as in numpy."""

    __slots__ = ()
    ufunc: ClassVar[Any]
    x: Operand
    y: Operand

    def infer(self) -> TensorType:
        kind = same_dtype(self.opname, self.x, self.y)
        number_operand(self.opname, self.x)
        return TensorType(kind, broadcast(self.x.type.shape, self.y.type.shape))

    @np.errstate(all="ignore")
    def evaluate(self, x: Any, y: Any) -> Any:
        return type(self).ufunc(x, y)


class FloatBinary(Binary):
    """Base of the arithmetic that integers have no part in."""

    __slots__ = ()

    def infer(self) -> TensorType:
        kind = same_dtype(self.opname, self.x, self.y)
        float_operand(self.opname, self.x)
        return TensorType(kind, broadcast(self.x.type.shape, self.y.type.shape))


class Unary(Op):
    """Base of the functions of one number, integer or float."""

    __slots__ = ()
    ufunc: ClassVar[Any]
    x: Operand

    def infer(self) -> TensorType:
        return number_operand(self.opname, self.x).whole

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return type(self).ufunc(x)


class FloatUnary(Unary):
    """Base of the functions of one floating-point number."""

    __slots__ = ()

    def infer(self) -> TensorType:
        return float_operand(self.opname, self.x).whole


@operation("add", sharding="..., ... -> ...", sums="x y", commutative=True)
class Add(Binary):
    """x + y."""

    x: Operand
    y: Operand
    ufunc = np.add


@operation("sub", sharding="..., ... -> ...", sums="x y")
class Sub(Binary):
    """x - y."""

    x: Operand
    y: Operand
    ufunc = np.subtract


@operation("mul", sharding="..., ... -> ...", sums="x | y", commutative=True)
class Mul(Binary):
    """x * y."""

    x: Operand
    y: Operand
    ufunc = np.multiply


@operation("div", sharding="..., ... -> ...", sums="x")
class Div(FloatBinary):
    """x / y in floats; integers have floor_div."""

    x: Operand
    y: Operand
    ufunc = np.divide


@operation("floor_div", sharding="..., ... -> ...")
class FloorDiv(Binary):
    """x / y rounded down (towards minus infinity, as in Python): -7 by 2 is -4."""

    x: Operand
    y: Operand
    ufunc = np.floor_divide


@operation("mod", sharding="..., ... -> ...")
class Mod(Binary):
    """x - y * floor(x / y), with the sign of y (as in Python): -7 by 2 is 1."""

    x: Operand
    y: Operand
    ufunc = np.mod


@operation("pow", sharding="..., ... -> ...")
class Pow(FloatBinary):
    """x to the power y, in floats; NaN for a negative x and a fractional y."""

    x: Operand
    y: Operand
    ufunc = np.power


@operation("minimum", sharding="..., ... -> ...", commutative=True)
class Minimum(Binary):
    """The smaller of x and y; NaN where one is NaN."""

    x: Operand
    y: Operand
    ufunc = np.minimum


@operation("maximum", sharding="..., ... -> ...", commutative=True)
class Maximum(Binary):
    """The larger of x and y; NaN where one is NaN."""

    x: Operand
    y: Operand
    ufunc = np.maximum


@operation("neg", sharding="... -> ...", sums="x")
class Neg(Unary):
    """-x."""

    x: Operand
    ufunc = np.negative


@operation("abs", sharding="... -> ...")
class Abs(Unary):
    """|x|."""

    x: Operand
    ufunc = np.abs


@operation("sign", sharding="... -> ...")
class Sign(Unary):
    """-1, 0 or 1 as x is negative, zero or positive; NaN for NaN."""

    x: Operand
    ufunc = np.sign


@operation("clip", sharding="... -> ...")
class Clip(Unary):
    """x kept between `low` and `high`, either of which may be none; NaN stays NaN."""

    x: Operand
    low: Number | None = None
    high: Number | None = None

    def infer(self) -> TensorType:
        kind = number_operand(self.opname, self.x)
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if not bounds:
            raise Error("clip needs low, high or both")
        for bound in bounds:
            number_fits(self.opname, bound, kind.dtype)
        if bounds[0] > bounds[-1]:
            raise Error(f"clip: low {self.low} is above high {self.high}")
        return kind.whole

    def evaluate(self, x: Any) -> Any:
        return np.clip(x, self.low, self.high)
