"""Rules of `canonicalize` about numbers. All are exact, for NaN, infinities and -0.0 too."""

from __future__ import annotations

import math

from irc.ir.attributes import Number
from irc.ir.core import Op, Value
from irc.ir.dtypes import dtype, lossless
from irc.ops import Add, Cast, Eq, Ne, Sub
from irc.rewrite import P, rule
from irc.rewrite.constants import uniform

from .fitting import fitting


def is_negative_zero(value: Number) -> bool:
    """Whether a number is -0.0 and not 0."""
    return value == 0 and math.copysign(1.0, value) < 0


@rule(P.add("x", P.constant("zero", value=0)).capture("root"))
def add_zero(x: Value, zero: Value, root: Op) -> Value | None:
    """x + 0 is x in integers, x + -0.0 in floats; -0.0 + 0.0 would be 0.0."""
    value = uniform(zero)
    exact = value is not None and is_negative_zero(value)
    return fitting(x, root) if exact or not dtype(x.type.dtype).is_float else None


@rule(P.sub("x", P.constant("zero", value=0)).capture("root"))
def subtract_zero(x: Value, zero: Value, root: Op) -> Value | None:
    """x - 0 is x in integers, x - 0.0 in floats; -0.0 - -0.0 would be 0.0."""
    value = uniform(zero)
    return None if value is None or is_negative_zero(value) else fitting(x, root)


_ONE = P.constant(value=1)


@rule((P.mul("x", _ONE) | P.div("x", _ONE) | P.pow("x", _ONE)).capture("root"))
def times_one(x: Value, root: Op) -> Value | None:
    """x * 1, x / 1 and x to the power of 1 are x."""
    return fitting(x, root)


@rule(P.neg(P.neg("x", shared=True)) | P.not_(P.not_("x", shared=True)))
def twice(x: Value) -> Value:
    """-(-x) and not not x are x."""
    return x


@rule(P.add("x", P.neg("y")))
def add_negative(x: Value, y: Value) -> Op:
    """x + (-y) is x - y."""
    return Sub(x, y)


@rule(P.sub("x", P.neg("y")))
def subtract_negative(x: Value, y: Value) -> Op:
    """x - (-y) is x + y."""
    return Add(x, y)


@rule(P.abs((P.abs("x", shared=True) | P.neg("x", shared=True)).capture("inner")).capture("root"))
def absolute(x: Value, inner: Op, root: Op) -> Op | Value:
    """abs(abs(x)) and abs(-x) are abs(x)."""
    return inner.result if inner.opname == "abs" else root.rebuilt([x])


@rule(P.relu(P.relu("x", shared=True).capture("inner")))
def relu_twice(x: Value, inner: Op) -> Value:
    """relu(relu(x)) is relu(x)."""
    return inner.result


@rule(P.minimum("x", "x") | P.maximum("x", "x") | P.and_("x", "x") | P.or_("x", "x"))
def same_operands(x: Value) -> Value:
    """The minimum, maximum, and, or of x with itself is x."""
    return x


@rule((P.and_("x", P.full(True)) | P.or_("x", P.full(False))).capture("root"))
def neutral_logic(x: Value, root: Op) -> Value | None:
    """x and true, x or false are x."""
    return fitting(x, root)


@rule(P.not_((P.eq("x", "y") | P.ne("x", "y")).capture("inner")))
def not_equal(x: Value, y: Value, inner: Op) -> Op:
    """not (x == y) is x != y and the other way round, where one is NaN too."""
    return Ne(x, y) if inner.opname == "eq" else Eq(x, y)


@rule(P.where(P.constant("condition"), "x", "y").capture("root"))
def where_constant(condition: Value, x: Value, y: Value, root: Op) -> Value | None:
    """where of a constant condition is one of its operands."""
    return fitting(x if uniform(condition) else y, root)


@rule(P.where("condition", "x", "x").capture("root"))
def where_same(condition: Value, x: Value, root: Op) -> Value | None:
    """where with the same value on both sides is that value."""
    return fitting(x, root)


@rule(P.cast("x").capture("root"))
def cast_to_itself(x: Value, root: Op) -> Value | None:
    """A cast to the dtype that a value has already."""
    return fitting(x, root)


@rule(P.cast(P.cast("x", shared=True).capture("inner")).capture("root"))
def cast_chain(x: Value, inner: Op, root: Op) -> Op | None:
    """A cast that loses nothing, before another: only the other remains."""
    if not lossless(x.type.dtype, inner.result.type.dtype):
        return None
    return Cast(x, dtype=root.result.type.dtype)
