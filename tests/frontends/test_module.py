"""Modules: the tree of names, lists, shared parameters, scopes and hints in dumps."""

from typing import Any

import pytest

import irc
from irc.frontends import Module, ModuleList, Parameter, Tensor
from irc.frontends import functional as F
from irc.frontends.layers import Linear
from irc.source import shown_path

from .helpers import traced


class Block(Module):
    def __init__(self, size: int) -> None:
        self.up = Linear(size, size, bias=False)
        self.scale = Parameter((size,))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x)) * self.scale


class Net(Module):
    def __init__(self, count: int = 3) -> None:
        self.first = Parameter((4,))
        self.blocks = ModuleList(Block(4) for _ in range(count))
        self.head = Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first
        for block in self.blocks:
            x = block(x)
        return self.head(x)


SPEC = {"x": irc.Spec("f32", ("B", 4))}


def test_names_are_paths_of_attributes_in_order() -> None:
    names = ["first", "blocks.0.up.weight", "blocks.0.scale", "blocks.1.up.weight"]
    names += ["blocks.1.scale", "head.weight", "head.bias"]
    assert [name for name, _ in Net(2).named_parameters()] == names
    modules = [name for name, _ in Net(1).named_modules()]
    assert modules == ["", "blocks", "blocks.0", "blocks.0.up", "head"]
    assert len(list(Net(2).parameters())) == 7
    weights = irc.trace(Net(2), SPEC).weights
    assert list(weights) == names
    weight = weights["head.weight"]
    assert str(weight.type) == "f32[2, 4]" and str(weight.ref) == 'unbound("head.weight")'


def test_module_lists_index_slice_and_iterate() -> None:
    blocks = Net(3).blocks
    assert len(blocks) == 3 and blocks[-1] is blocks[2] and list(blocks)[1] is blocks[1]
    part = blocks[1:]
    assert isinstance(part, ModuleList) and list(part) == [blocks[1], blocks[2]]
    with pytest.raises(irc.Error, match="holds modules, not a int"):
        ModuleList([1])  # type: ignore[list-item]


def test_a_shared_parameter_is_one_weight_and_an_unused_one_is_none() -> None:
    class Tied(Module):
        def __init__(self) -> None:
            self.one, self.two = Linear(4, 4, bias=False), Linear(4, 4, bias=False)
            self.two.weight = self.one.weight
            self.unused = Parameter((4,))

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    module = irc.trace(Tied(), SPEC)
    assert list(module.weights) == ["one.weight"]
    assert sum(module.weights["one.weight"].users.values()) == 2


def test_a_shared_module_has_its_first_name() -> None:
    class Twice(Module):
        def __init__(self) -> None:
            self.one = Block(4)
            self.two = self.one
            self.parent = self  # a reference to an ancestor is no child

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    assert [name for name, _ in Twice().named_modules()] == ["", "one", "one.up"]
    module = irc.trace(Twice(), SPEC)
    assert list(module.weights) == ["one.up.weight", "one.scale"]
    assert {op.loc.scope for op in module.main if op.loc} == {"one.up", "one", ""}


def test_scopes_and_hints() -> None:
    net = Net(2)
    module = irc.trace(net, SPEC)
    scopes = [op.loc.scope for op in module.main if op.loc is not None]
    assert scopes[:4] == ["", "blocks.0.up", "blocks.0", "blocks.0"]
    names = [value.name for op in module.main for value in op.results]
    assert names == [None, "up", None, "blocks_0", "up", None, "blocks_1", "head"]
    assert str(irc.trace(net, SPEC)) == str(module), "a model can be traced again"


def test_a_hint_renames_no_input_and_no_named_tensor() -> None:
    class Same(Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Named(Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).named("mine")

    class Outer(Module):
        def __init__(self) -> None:
            self.same, self.inner = Same(), Named()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.same(self.same(x) + 1))

    module = irc.trace(Outer(), SPEC)
    assert [str(a.name) for a in module.main.args] == ["x"]
    assert [v.name for op in module.main for v in op.results] == [None, None, None, "mine"]


def message_of(model: Any) -> str:
    with pytest.raises(irc.Error) as caught:
        irc.trace(model, SPEC)
    return str(caught.value)


def test_shape_errors_name_line_and_scope() -> None:
    class Wrong(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](F.concat([x, x], -1))

    text = message_of(Wrong())
    assert (
        text.startswith(shown_path(__file__) + ":")
        and " in blocks.1.up: linear: x is [B, 8]" in text
    )
    assert "\n    linear %_, @blocks.1.up.weight" in text


def test_modules_in_a_plain_list_are_an_error() -> None:
    class Plain(Module):
        def __init__(self) -> None:
            self.layers = [Linear(4, 4)]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    text = message_of(Plain())
    assert "parameter of shape [4, 4] belongs to no part" in text and "ModuleList" in text


def test_calls_that_are_errors() -> None:
    class Empty(Module):
        pass

    assert "Empty has no method called forward" in message_of(Empty())
    with pytest.raises(irc.Error, match="Empty has no method called forward"):
        Empty()(1)
    with pytest.raises(irc.Error, match=r"Net runs only inside irc\.trace"):
        Net()(1)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((4, 0), "f32", r"positive numbers, not \[4, 0\]"), ((4,), "fp16", "no dtype called 'fp16'")],
)
def test_parameters_are_checked(shape: tuple[int, ...], dtype: str, message: str) -> None:
    with pytest.raises(irc.Error, match=f"test_module.py:.*{message}"):
        Parameter(shape, dtype)


def test_parameters_with_a_name_in_a_function() -> None:
    table = Parameter((4,), name="table")
    assert list(traced(lambda x: x * table, x=("f32", ("B", 4))).weights) == ["table"]
    twin = Parameter((4,), name="table")
    with pytest.raises(irc.Error, match="two parameters are called 'table'"):
        traced(lambda x: x * table + twin, x=("f32", ("B", 4)))
