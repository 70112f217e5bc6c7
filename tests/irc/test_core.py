"""Editing the graph: links, order, erasing, iterating while editing."""

import html
from textwrap import indent

import pytest

from irc.errors import Error
from irc.ir.core import Function, Module, Op
from irc.ir.types import TensorType
from irc.ir.verify import verify
from irc.ops import Add, Linear, Mul, Neg, Return

T = TensorType("f32", (4, 8))


def chain(length: int = 3) -> tuple[Module, Function, list[Op]]:
    module = Module("m")
    function = module.add_function(Function("forward", [("x", T)]))
    value = function.args[0]
    ops: list[Op] = []
    for _ in range(length):
        ops.append(function.append(Neg(value)))
        value = ops[-1].result
    function.append(Return([value]))
    return module, function, ops


def test_users_count_operands() -> None:
    _, function, _ = chain(0)
    x = function.args[0]
    square = Mul(x, x)
    assert x.users[square] == 2
    square.set_operands((x, Neg(x).result))
    assert x.users[square] == 1


def test_replace_moves_every_use_and_the_name() -> None:
    module, function, ops = chain()
    ops[0].result.name = "first"
    new = function.insert(Add(function.args[0], function.args[0]), ops[1])
    ops[0].result.replace_by(new.result)
    ops[0].erase()
    assert new.result.name == "first"
    assert ops[1].operands == (new.result,)
    verify(module)


def test_erasing_and_inserting_while_iterating() -> None:
    module, function, _ = chain(6)
    seen = 0
    for op in function:
        if op.opname != "neg":
            continue
        seen += 1
        op.result.replace_by(op.operands[0])
        op.erase()
    assert seen == 6
    assert [op.opname for op in function] == ["return"]
    verify(module)


def test_order_is_the_order_of_insertion_before() -> None:
    _, function, ops = chain(2)
    between = function.insert(Neg(function.args[0]), ops[1])
    assert list(function)[:3] == [ops[0], between, ops[1]]
    assert list(reversed(function)) == list(function)[::-1]


def test_an_operation_in_use_cannot_be_erased() -> None:
    _, _, ops = chain()
    with pytest.raises(Error, match="cannot erase neg: its result is still used"):
        ops[0].erase()


def test_operands_must_be_values() -> None:
    with pytest.raises(TypeError, match="an operand must be a value"):
        Neg(3)  # type: ignore[arg-type]


def test_optional_operands_keep_their_names() -> None:
    function = Function(
        "f", [("x", T), ("w", TensorType("f32", (6, 8))), ("b", TensorType("f32", (6,)))]
    )
    x, w, b = function.args
    linear = Linear(x, w, bias=b)
    assert linear.bias is b
    assert Linear(x, w).bias is None
    assert dict(linear.named_operands()) == {"x": x, "weight": w, "bias": b}
    again = linear.rebuilt(linear.operands)
    assert again.bias is b and again.type_key() == linear.type_key()


def test_names_are_unique_in_a_module() -> None:
    module, _, _ = chain()
    with pytest.raises(Error, match="two functions called @forward"):
        module.add_function(Function("forward"))


def test_what_an_interpreter_and_a_notebook_show() -> None:
    module, function, _ = chain(3)
    assert repr(function) == "<function @forward, operations: 4>"
    assert repr(module) == "<module @m, functions: 1, weights: 0, operations: 4>"
    assert indent(str(function), "  ") in str(module)
    shown = module._repr_html_()
    assert "<summary>&lt;module @m, functions: 1" in shown
    assert html.unescape(shown).count("= neg %") == 3


def test_a_notebook_shows_the_beginning_of_a_long_module() -> None:
    shown = chain(300)[1]._repr_html_()
    assert shown.count("= neg %") == 199
    assert "... 103 more lines: print() shows all" in shown
