"""Arithmetic, one element at a time, and the bases of functions of one or two numbers.

Operands of two-operand operations share one dtype and broadcast as in numpy. Integers wrap around
on overflow. Division by zero follows IEEE 754 in floats and is undefined in integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.attributes import Number
from ..ir.core import Op, Value
from ..ir.declare import Operand, operation, operation_base
from ..ir.types import TensorType
from .shapes import broadcast, float_operand, number_fits, number_operand, same_dtype

Check: TypeAlias = Callable[[str, Value], TensorType]  # of an operand, see shapes.py


class OfUfunc(Op):
    """Base of the functions that evaluate as numpy's `ufunc`; without one they are composite."""

    __slots__ = ()
    ufunc: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "ufunc" in vars(cls):
            cls.evaluate = OfUfunc._by_ufunc

    @np.errstate(all="ignore")
    def _by_ufunc(self, *operands: Any) -> Any:
        return type(self).ufunc(*operands)


@operation_base
class Binary(OfUfunc):
    """Base of the functions of two operands of one dtype, which broadcast as in numpy."""

    __slots__ = ()
    sharding: ClassVar = "..., ... -> ..."
    check: ClassVar[Check] = staticmethod(number_operand)
    made: ClassVar[str] = ""  # the dtype of the result, where it is not that of the operands
    x: Operand
    y: Operand

    def infer(self) -> TensorType:
        self.check(self.opname, self.x)
        kind = same_dtype(self.opname, self.x, self.y)
        return TensorType(self.made or kind, broadcast(self.x.type.shape, self.y.type.shape))


class FloatBinary(Binary):
    """Base of the arithmetic on floating-point numbers only."""

    __slots__ = ()
    check: ClassVar[Check] = staticmethod(float_operand)


@operation_base
class Unary(OfUfunc):
    """Base of the functions of one number, integer or float."""

    __slots__ = ()
    sharding: ClassVar = "... -> ..."
    check: ClassVar[Check] = staticmethod(number_operand)
    x: Operand

    def infer(self) -> TensorType:
        return self.check(self.opname, self.x).replicated


class FloatUnary(Unary):
    """Base of the functions of one floating-point number."""

    __slots__ = ()
    check: ClassVar[Check] = staticmethod(float_operand)


@operation("add", sums="x y", commutative=True)
class Add(Binary):
    """x + y."""

    ufunc = np.add


@operation("sub", sums="x y")
class Sub(Binary):
    """x - y."""

    ufunc = np.subtract


@operation("mul", sums="x | y", commutative=True)
class Mul(Binary):
    """x * y."""

    ufunc = np.multiply


@operation("div", sums="x", safe_values={"y": 1})
class Div(FloatBinary):
    """x / y in floats; integers have floor_div."""

    ufunc = np.divide


@operation("floor_div", safe_values={"y": 1})
class FloorDiv(Binary):
    """x / y rounded down (towards minus infinity, as in Python): -7 by 2 is -4."""

    ufunc = np.floor_divide


@operation("mod", safe_values={"y": 1})
class Mod(Binary):
    """x - y * floor(x / y), with the sign of y (as in Python): -7 by 2 is 1."""

    ufunc = np.mod


@operation("pow")
class Pow(FloatBinary):
    """x to the power y, in floats; NaN for a negative finite x and a fractional y."""

    @np.errstate(all="ignore")
    def evaluate(self, x: Any, y: Any) -> Any:
        # one exponent for each x: numpy takes the root for a scalar 0.5, NaN for -inf
        return np.power(x, np.array(np.broadcast_to(y, np.broadcast_shapes(x.shape, y.shape))))


@operation("minimum", keeps_zeros=True, bounded="operands")
class Minimum(Binary):
    """The smaller of x and y; NaN where one is NaN."""

    ufunc = np.minimum


@operation("maximum", keeps_zeros=True, bounded="operands")
class Maximum(Binary):
    """The larger of x and y; NaN where one is NaN."""

    ufunc = np.maximum


@operation("neg", sums="x", bounded="operands")
class Neg(Unary):
    """-x."""

    ufunc = np.negative


@operation("abs", keeps_zeros=True, bounded="operands")
class Abs(Unary):
    """|x|."""

    ufunc = np.abs


@operation("sign", keeps_zeros=True, bounded="always")
class Sign(Unary):
    """-1, 0 or 1 as x is negative, zero or positive; NaN for NaN."""

    ufunc = np.sign


@operation("clip", bounded="operands")
class Clip(Unary):
    """x kept between `low` and `high`, either of which may be none; NaN stays NaN."""

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
        return kind.replicated

    def evaluate(self, x: Any) -> Any:
        return np.clip(x, self.low, self.high)
