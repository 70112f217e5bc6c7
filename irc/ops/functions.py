"""Elementary functions of one floating-point number: roots, exponentials, sines, rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..ir.declare import operation
from .elementwise import FloatUnary


@operation("sqrt", keeps_zeros=True)
class Sqrt(FloatUnary):
    """The square root; NaN for negative x."""

    ufunc = np.sqrt


@operation("rsqrt")
class Rsqrt(FloatUnary):
    """1 / sqrt(x); infinity for 0, NaN for negative x."""

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return 1 / np.sqrt(x)


@operation("reciprocal")
class Reciprocal(FloatUnary):
    """1 / x."""

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return 1 / x


@operation("exp")
class Exp(FloatUnary):
    """e to the power x."""

    ufunc = np.exp


@operation("log")
class Log(FloatUnary):
    """The natural logarithm; -infinity for 0, NaN for negative x."""

    ufunc = np.log


@operation("sin", keeps_zeros=True, bounded="always")
class Sin(FloatUnary):
    """The sine of x in radians."""

    ufunc = np.sin


@operation("cos", bounded="always")
class Cos(FloatUnary):
    """The cosine of x in radians."""

    ufunc = np.cos


def erf(x: Any) -> Any:
    """The error function of an array; numpy has none, the standard library's is exact."""
    values = [math.erf(value) for value in np.ravel(x).tolist()]
    return np.array(values, np.asarray(x).dtype).reshape(np.shape(x))


@operation("erf", keeps_zeros=True, bounded="always")
class Erf(FloatUnary):
    """The error function: 2/sqrt(pi) times the integral of exp(-t*t) from 0 to x."""

    def evaluate(self, x: Any) -> Any:
        return erf(x)


@operation("round", keeps_zeros=True, bounded="operands")
class Round(FloatUnary):
    """The nearest integer, halves to the even one: 0.5 gives 0, 1.5 gives 2."""

    ufunc = np.rint


@operation("floor", keeps_zeros=True, bounded="operands")
class Floor(FloatUnary):
    """The largest integer not above x."""

    ufunc = np.floor


@operation("ceil", keeps_zeros=True, bounded="operands")
class Ceil(FloatUnary):
    """The smallest integer not below x."""

    ufunc = np.ceil
