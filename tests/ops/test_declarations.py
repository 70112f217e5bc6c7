"""Errors, sharding and types common to all declarations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
from irc import ops
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Value
from irc.ir.declare import REGISTRY, operation, types_of
from irc.ir.types import TensorType
from irc.text.cursor import Cursor
from irc.text.literals import parse_type
from tests.user_code import restored_registries


def value(type: str) -> Value:
    return Value(parse_type(Cursor(type, "type")), None, 0, "x")


def test_every_operation_class_has_a_name_for_importers() -> None:
    declared = {cls.__name__: cls for cls in REGISTRY.values()}
    assert sorted(declared) == ops.__all__
    assert all(getattr(ops, name) is cls for name, cls in declared.items())


def test_an_error_in_an_expansion_is_about_the_composite_operation() -> None:
    with pytest.raises(Error) as caught:
        ops.Silu(value("i32[4]"))
    assert caught.value.op is not None and caught.value.op.opname == "silu"
    assert caught.value.message.startswith("silu takes floating-point operands")


def test_an_error_of_a_helper_gets_the_name_of_the_operation() -> None:
    with pytest.raises(Error) as caught:
        ops.Add(value("f32[4]"), value("f32[3]"))
    assert caught.value.message.startswith("add: the shapes [4] and [3] do not broadcast")


def test_memoized_types_distinguish_numbers_by_type() -> None:
    """1, 1.0 and True are equal in Python, and result types are memoized by attribute."""
    for first in (1, True):
        assert str(ops.Full(value=first, dtype="i32").result.type) == "i32[]"
    with pytest.raises(Error, match=r"full: 1.0 is not an integer that i32 holds"):
        ops.Full(value=1.0, dtype="i32")
    ops.Constant(values=(1, 2), shape=(2,), dtype="i32")
    with pytest.raises(Error, match=r"constant: 2.0 is not an integer"):
        ops.Constant(values=(1, 2.0), shape=(2,), dtype="i32")


@pytest.mark.parametrize("number", [1 << 64, -(1 << 63) - 1])
def test_numbers_have_64_bits(number: int) -> None:
    with pytest.raises(Error, match="integers have 64 bits"):
        ops.Full(value=number, dtype="u64")


def test_a_number_beyond_all_floats() -> None:
    with pytest.raises(Error, match="theta of rope"):
        ops.Rope(value("f32[1, 2, 8]"), value("i32[1, 2]"), head_dim=8, theta=10**400)


def test_types_of_a_call_follow_its_callee() -> None:
    callee = Function("f", [("x", TensorType("f32", (4,)))])
    callee.append(ops.Return([callee.args[0]]))
    call = ops.Call([value("f32[4]")], callee=callee)
    assert [str(t) for t in types_of(call)] == ["f32[4]"]
    end = callee.last
    assert end is not None
    end.erase()
    callee.append(ops.Return([]))
    assert types_of(call) == ()


def test_a_partial_bias_joins_a_contraction_over_the_same_axis() -> None:
    x, weight = value("f32[4, 8@tp]"), value("f32[6, 8@tp]")
    joined = ops.Linear(x, weight, bias=value("f32[6]{sum tp}"))
    assert str(joined.result.type) == "f32[4, 6]{sum tp}"
    with pytest.raises(Error, match="would add bias once per rank of tp"):
        ops.Linear(x, weight, bias=value("f32[6]"))
    with pytest.raises(Error, match="mixes a partial sum over cp"):
        ops.Linear(x, weight, bias=value("f32[6]{sum cp tp}"))


def test_a_repeated_dimension_cannot_be_sharded() -> None:
    q, k = value("f32[2, 3, 16]"), value("f32[2, 5, 16]")
    mask = value("bool[1@dp, 1, 3, 5]")
    with pytest.raises(Error, match="repeats a dimension of size 1 in mask"):
        ops.Attention(q, k, k, mask=mask, head_dim=4)


def test_a_use_of_a_failed_operation_is_not_recorded() -> None:
    x = value("f32[4]")
    with pytest.raises(Error):
        ops.Add(x, value("i32[4]"))
    assert not x.users
    ops.Neg(x)
    assert len(x.users) == 1


def test_an_operation_on_a_base_of_functions_may_be_composite(tmp_path: Path) -> None:
    with restored_registries():

        @operation("eightfold", bounded="no")
        class Eightfold(ops.elementwise.FloatUnary):
            """8 x."""

            def expand(self) -> Op:
                factor = ops.Full(value=8.0, shape=(), dtype=self.x.type.dtype)
                return ops.Mul(self.x, factor)

        function = Function("forward", [("x", TensorType("f32", (2,)))])
        function.append(Eightfold(function.args[0]))
        function.append(ops.Return(function.last.results if function.last else ()))
        module = Module("m")
        module.add_function(function)
        x = np.array([0.5, np.inf], np.float32)
        artifact = irc.compile(module, tmp_path / "a")
        for outputs in (irc.evaluate(module, {"x": x}), artifact.run({"x": x})):
            assert next(iter(outputs.values())).tolist() == [4, np.inf]


def test_a_name_that_no_text_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"my\.op.: a name is letters, digits and underscores"):
        operation("my.op")(Op)
