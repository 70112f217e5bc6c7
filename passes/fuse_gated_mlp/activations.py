"""Rules that recognise activations written in simpler operations."""

from __future__ import annotations

import math

from irc.ir.core import Op, Value
from irc.ops import Gelu, QuickGelu, Silu, SquaredRelu
from irc.rewrite import P, Pattern, decline, rule

_ACCURACY = 5e-4  # relative: constants may have been rounded to f16


def _near(number: float) -> Pattern:
    """The pattern of a constant of about this value."""

    def near(value: float) -> bool:
        return math.isclose(value, number, rel_tol=_ACCURACY)

    return P.constant(value=near)


def _checked(new: Op, root: Op) -> Op | None:
    """The activation, unless a constant broadcasts x."""
    if new.result.type is not root.result.type:
        return decline("a constant broadcasts the operand")
    return new


@rule(P.mul("x", P.sigmoid("x")).capture("root"))
def silu(x: Value, root: Op) -> Op | None:
    """x * sigmoid(x) is silu."""
    return _checked(Silu(x), root)


@rule(P.mul("x", P.sigmoid(P.mul("x", _near(1.702)))).capture("root"))
def quick_gelu(x: Value, root: Op) -> Op | None:
    """x * sigmoid(1.702 x) is quick_gelu."""
    return _checked(QuickGelu(x), root)


_POSITIVE = P.relu("x", shared=True)


@rule((P.mul(_POSITIVE, _POSITIVE) | P.pow(_POSITIVE, P.full(2))).capture("root"))
def squared_relu(x: Value, root: Op) -> Op | None:
    """relu(x) * relu(x) is squared_relu."""
    return _checked(SquaredRelu(x), root)


def _halved(inner: Pattern) -> Pattern:
    """x/2 * (1 + inner), in every order of the factors."""
    sum, half = P.add(inner, P.full(1)), P.full(0.5)
    return (
        P.mul(P.mul("x", sum), half) | P.mul(P.mul("x", half), sum) | P.mul("x", P.mul(sum, half))
    ).capture("root")


_ROOT = math.sqrt(2)
_CUBE = P.mul(P.mul("x", "x"), "x") | P.pow("x", P.full(3))
_BENT = P.mul(P.add("x", P.mul(_CUBE, _near(0.044715))), _near(math.sqrt(2 / math.pi)))


@rule(_halved(P.erf(P.div("x", _near(_ROOT)) | P.mul("x", _near(1 / _ROOT)))))
def gelu(x: Value, root: Op) -> Op | None:
    """x/2 * (1 + erf(x / sqrt 2)) is gelu."""
    return _checked(Gelu(x), root)


@rule(_halved(P.tanh(_BENT)))
def tanh_gelu(x: Value, root: Op) -> Op | None:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) is gelu by tanh."""
    return _checked(Gelu(x, approximate="tanh"), root)


ACTIVATIONS = [silu, quick_gelu, squared_relu, gelu, tanh_gelu]
