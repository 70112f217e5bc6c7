"""Elementary functions of one floating-point number: roots, exponentials, sines, rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..declare import Operand, operation
from .elementwise import FloatUnary


@operation("sqrt", sharding="... -> ...")
class Sqrt(FloatUnary):
    """The square root; NaN for negative x."""

    x: Operand
    ufunc = np.sqrt


@operation("rsqrt", sharding="... -> ...")
class Rsqrt(FloatUnary):
    """1 / sqrt(x); infinity for 0, NaN for negative x."""

    x: Operand

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return 1 / np.sqrt(x)


@operation("reciprocal", sharding="... -> ...")
class Reciprocal(FloatUnary):
    """1 / x."""

    x: Operand

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return 1 / x


@operation("exp", sharding="... -> ...")
class Exp(FloatUnary):
    """e to the power x."""

    x: Operand
    ufunc = np.exp


@operation("log", sharding="... -> ...")
class Log(FloatUnary):
    """The natural logarithm; -infinity for 0, NaN for negative x."""

    x: Operand
    ufunc = np.log


@operation("sin", sharding="... -> ...")
class Sin(FloatUnary):
    """The sine of x in radians."""

    x: Operand
    ufunc = np.sin


@operation("cos", sharding="... -> ...")
class Cos(FloatUnary):
    """The cosine of x in radians."""

    x: Operand
    ufunc = np.cos


def erf(x: Any) -> Any:
    """The error function of an array; numpy has none, the standard library's is exact."""
    values = [math.erf(value) for value in np.ravel(x).tolist()]
    return np.array(values, np.asarray(x).dtype).reshape(np.shape(x))


@operation("erf", sharding="... -> ...")
class Erf(FloatUnary):
    """The error function: 2/sqrt(pi) times the integral of exp(-t*t) from 0 to x."""

    x: Operand

    def evaluate(self, x: Any) -> Any:
        return erf(x)


@operation("round", sharding="... -> ...")
class Round(FloatUnary):
    """The nearest integer, halves to the even one: 0.5 gives 0, 1.5 gives 2."""

    x: Operand
    ufunc = np.rint


@operation("floor", sharding="... -> ...")
class Floor(FloatUnary):
    """The largest integer not above x."""

    x: Operand
    ufunc = np.floor


@operation("ceil", sharding="... -> ...")
class Ceil(FloatUnary):
    """The smallest integer not below x."""

    x: Operand
    ufunc = np.ceil
