"""Propagation of axes and pending sums, and every way in which it refuses."""

from __future__ import annotations

import pytest

from irc.core import Value
from irc.errors import Error
from irc.ops import Add, Linear, Matmul, Mul, Neg, Silu, Softmax
from irc.text.cursor import Cursor
from irc.text.literals import parse_type


def value(type: str) -> Value:
    return Value(parse_type(Cursor(type, "type")), None, 0, "x")


def made(op: object) -> str:
    return str(op.result.type)  # type: ignore[attr-defined]


def test_axes_follow_names() -> None:
    assert made(Linear(value("f32[B, 8]"), value("f32[6@tp, 8]"))) == "f32[B, 6@tp]"
    assert made(Linear(value("f32[B@dp, 8]"), value("f32[6@tp, 8]"))) == "f32[B@dp, 6@tp]"


def test_a_contracted_split_is_a_pending_sum() -> None:
    assert made(Linear(value("f32[B, 8@tp]"), value("f32[6, 8@tp]"))) == "f32[B, 6]{sum tp}"
    assert (
        made(Matmul(value("f32[4, 8@cp.tp]"), value("f32[8@cp.tp, 6]"))) == "f32[4, 6]{sum cp tp}"
    )


def test_pending_sums_pass_where_the_operation_is_additive() -> None:
    pending = "f32[4, 8]{sum tp}"
    assert made(Neg(value(pending))) == pending
    assert made(Add(value(pending), value(pending))) == pending
    assert made(Mul(value(pending), value("f32[4, 8]"))) == pending
    assert made(Linear(value(pending), value("f32[6, 8]"))) == "f32[4, 6]{sum tp}"


def test_a_broadcast_dimension_meets_a_split_one() -> None:
    assert made(Add(value("f32[4, 8@tp]"), value("f32[4, 1]"))) == "f32[4, 8@tp]"
    assert made(Add(value("f32[4@tp, 8]"), value("f32[8]"))) == "f32[4@tp, 8]"


def refused(build: object, message: str) -> None:
    with pytest.raises(Error, match=message):
        build()  # type: ignore[operator]


def test_refusals() -> None:
    pending, whole = "f32[4, 8]{sum tp}", "f32[4, 8]"
    refused(
        lambda: Silu(value(pending)), "silu needs complete operands, but x is a partial sum over tp"
    )
    refused(
        lambda: Add(value(pending), value(whole)), "add mixes a partial sum over tp with a complete"
    )
    refused(lambda: Mul(value(pending), value(pending)), "mul multiplies partial sums")
    refused(
        lambda: Linear(value("f32[4, 8@tp]"), value("f32[6, 8]")),
        "dimension 'k' is split over tp in x and whole in w",
    )
    refused(
        lambda: Add(value("f32[4, 8@tp]"), value("f32[4, 8@dp]")),
        "a leading dimension is split over tp in x and split over dp in y",
    )
    refused(lambda: Softmax(value("f32[4, 8@tp]")), "softmax needs dimension .* whole")
    refused(
        lambda: Linear(value("f32[4, 8@tp]"), value("f32[6, 8@tp]"), bias=value("f32[6]")),
        "linear would add bias once per rank of tp",
    )
    refused(
        lambda: Linear(value("f32[4, 8]{sum tp}"), value("f32[6, 8]"), bias=value("f32[6]")),
        "mixes a partial sum",
    )
