"""Propagation of axes and partial sums, and its errors."""

from typing import Any

import pytest

from irc.errors import Error
from irc.ir.core import Value
from irc.ops import Add, Linear, Matmul, Mul, Neg, Silu, Softmax
from irc.text.cursor import Cursor
from irc.text.literals import parse_type


def value(type: str) -> Value:
    return Value(parse_type(Cursor(type, "type")), None, 0, "x")


def linear(x: Value, weight: Value, bias: Value) -> Linear:
    return Linear(x, weight, bias=bias)


PARTIAL, REPLICATED = "f32[4, 8]{sum tp}", "f32[4, 8]"


@pytest.mark.parametrize(
    ("op", "operands", "result"),
    [
        (Linear, ["f32[B, 8]", "f32[6@tp, 8]"], "f32[B, 6@tp]"),
        (Linear, ["f32[B@dp, 8]", "f32[6@tp, 8]"], "f32[B@dp, 6@tp]"),
        # sharded contracted dimensions
        (Linear, ["f32[B, 8@tp]", "f32[6, 8@tp]"], "f32[B, 6]{sum tp}"),
        (Matmul, ["f32[4, 8@cp.tp]", "f32[8@cp.tp, 6]"], "f32[4, 6]{sum cp tp}"),
        # partial operands of linear operations
        (Neg, [PARTIAL], PARTIAL),
        (Add, [PARTIAL, PARTIAL], PARTIAL),
        (Mul, [PARTIAL, REPLICATED], PARTIAL),
        (Linear, [PARTIAL, "f32[6, 8]"], "f32[4, 6]{sum tp}"),
        # broadcast dimensions
        (Add, ["f32[4, 8@tp]", "f32[4, 1]"], "f32[4, 8@tp]"),
        (Add, ["f32[4@tp, 8]", "f32[8]"], "f32[4@tp, 8]"),
    ],
)
def test_results(op: Any, operands: list[str], result: str) -> None:
    assert str(op(*map(value, operands)).result.type) == result


@pytest.mark.parametrize(
    ("op", "operands", "message"),
    [
        (Silu, [PARTIAL], "silu needs complete operands, but x is a partial sum over tp"),
        (Add, [PARTIAL, REPLICATED], "add mixes a partial sum over tp with a complete"),
        (Mul, [PARTIAL, PARTIAL], "mul multiplies partial sums"),
        (
            Linear,
            ["f32[4, 8@tp]", "f32[6, 8]"],
            "dimension 'k' is sharded over tp in x and replicated in w",
        ),
        (
            Add,
            ["f32[4, 8@tp]", "f32[4, 8@dp]"],
            "a leading dimension is sharded over tp in x and sharded over dp in y",
        ),
        (Softmax, ["f32[4, 8@tp]"], "softmax needs dimension .* replicated"),
        (linear, ["f32[4, 8@tp]", "f32[6, 8@tp]", "f32[6]"], "would add bias once per rank of tp"),
        (linear, [PARTIAL, "f32[6, 8]", "f32[6]"], "mixes a partial sum"),
    ],
)
def test_errors(op: Any, operands: list[str], message: str) -> None:
    with pytest.raises(Error, match=message):
        op(*map(value, operands))
