"""The functions derived from the registry: all there, typed in the stub, documented, located."""

import ast
import inspect
from typing import Any

import pytest

import irc
from irc.frontends import Tensor, stubs
from irc.frontends import functional as F
from irc.frontends.wrappers import NOT_WRAPPED, function_name
from irc.ir.declare import REGISTRY

from .helpers import traced


@pytest.mark.parametrize("op", sorted(REGISTRY))
def test_every_operation_is_reachable(op: str) -> None:
    if op in NOT_WRAPPED:
        with pytest.raises(irc.Error, match=f"no F.{op}: "):
            getattr(F, op)
        return
    function = getattr(F, function_name(op))
    cls = REGISTRY[op]
    names = {*cls.operand_names, *cls.optional_names, *cls.attribute_types}
    assert set(inspect.signature(function).parameters) == names
    assert function.__doc__ and function_name(op) in dir(F)


def test_the_stub_is_up_to_date() -> None:
    written = stubs.STUB.read_text(encoding="utf-8")
    assert written == stubs.stub(), "run python -m irc.frontends.stubs"


def test_the_stub_declares_what_the_functions_take() -> None:
    body = ast.parse(stubs.STUB.read_text(encoding="utf-8")).body
    declared = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
    for name, args in declared.items():
        parameters = inspect.signature(getattr(F, name)).parameters.values()
        plain = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        late = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert [a.arg for a in args.args] == plain, name
        assert [a.arg for a in args.kwonlyargs] == late, name


def test_results_and_shapes() -> None:
    def function(x: Tensor, y: Tensor) -> object:
        values, indices = F.topk(x, 2)
        (whole,) = F.split(x, -1, (4,))
        sum = F.reshape(y, ("B*S", 4)) + F.full(1.0, shape=("B*S", 1))
        return values, indices, F.softmax(whole, dim=-1), sum

    module = traced(function, x=("f32", (3, 4)), y=("f32", ("B", "S", 4)))
    kinds = [str(value.type) for value in module.main.returned]
    assert kinds == ["f32[3, 2]", "i32[3, 2]", "f32[3, 4]", "f32[B*S, 4]"]


def test_operations_with_an_expansion_of_two_results_return_both() -> None:
    module = traced(lambda x, w: F.add_rms_norm(x, x, w), x=("f32", (2, 4)), w=("f32", (4,)))
    assert [str(value.type) for value in module.main.returned] == ["f32[2, 4]"] * 2


def test_an_unknown_function_and_one_outside_a_trace() -> None:
    with pytest.raises(irc.Error, match=r"test_functional\.py.*no F\.sillu; did you mean 'silu'"):
        F.sillu  # noqa: B018  # pyright: ignore
    assert not hasattr(F, "sillu")
    message = r"F\.full builds a graph, so it works only inside irc\.trace"
    with pytest.raises(irc.Error, match=message):
        F.full(1.0)


def test_python_checks_the_arguments() -> None:
    function: Any = F.linear
    with pytest.raises(TypeError, match=r"linear\(\) got an unexpected keyword argument 'bais'"):
        traced(lambda x: function(x, x, bais=x), x=("f32", (2, 2)))
    with pytest.raises(TypeError, match=r"linear\(\) missing 1 required positional argument"):
        traced(lambda x: function(x), x=("f32", (2, 2)))


def test_operations_are_located_at_the_users_line() -> None:
    line = inspect.currentframe().f_lineno + 1  # pyright: ignore
    module = traced(lambda x: F.silu(x) + 1, x=("f32", (2,)))
    assert {(op.loc.file, op.loc.line) for op in module.main if op.opname != "return"} == {  # pyright: ignore
        ("test_functional.py", line)
    }
