"""Modules: the tree of names, lists, shared parts, scopes and hints in dumps."""

from typing import Any

import pytest

import irc
from irc.frontends import Module, ModuleList, Parameter, Tensor
from irc.frontends import functional as F
from irc.frontends.layers import Linear

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
    assert [name for name, _ in Net(2).named_parameters()] == [
        "first",
        "blocks.0.up.weight",
        "blocks.0.scale",
        "blocks.1.up.weight",
        "blocks.1.scale",
        "head.weight",
        "head.bias",
    ]
    modules = [name for name, _ in Net(1).named_modules()]
    assert modules == ["", "blocks", "blocks.0", "blocks.0.up", "head"]
    assert len(list(Net(2).parameters())) == 7
    assert list(irc.trace(Net(2), SPEC).weights) == [n for n, _ in Net(2).named_parameters()]


def test_weights_are_unbound_and_typed() -> None:
    weight = irc.trace(Net(), SPEC).weights["head.weight"]
    assert str(weight.type) == "f32[2, 4]" and str(weight.ref) == 'unbound("head.weight")'


def test_module_lists_index_slice_and_iterate() -> None:
    blocks = Net(3).blocks
    assert len(blocks) == 3 and blocks[-1] is blocks[2] and list(blocks)[1] is blocks[1]
    part = blocks[1:]
    assert isinstance(part, ModuleList) and list(part) == [blocks[1], blocks[2]]
    with pytest.raises(irc.Error, match="holds modules, not a int"):
        ModuleList([1])  # type: ignore[list-item]


def test_a_shared_parameter_is_one_weight() -> None:
    class Tied(Module):
        def __init__(self) -> None:
            self.one = Linear(4, 4, bias=False)
            self.two = Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

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
            self.parent = self  # a way back up is no part

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    assert [name for name, _ in Twice().named_modules()] == ["", "one", "one.up"]
    module = irc.trace(Twice(), SPEC)
    assert list(module.weights) == ["one.up.weight", "one.scale"]
    assert {op.loc.scope for op in module.main if op.loc} == {"one.up", "one", ""}


def test_a_parameter_that_is_not_used_is_no_weight() -> None:
    class Lazy(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.first

    assert list(irc.trace(Lazy(), SPEC).weights) == ["first"]


def test_scopes_and_hints() -> None:
    module = irc.trace(Net(2), SPEC)
    scopes = [op.loc.scope for op in module.main if op.loc is not None]
    assert scopes[:4] == ["", "blocks.0.up", "blocks.0", "blocks.0"]
    names = [value.name for op in module.main for value in op.results]
    assert names == [None, "up", None, "blocks_0", "up", None, "blocks_1", "head"]


def test_a_hint_does_not_rename_what_the_user_named_or_gave() -> None:
    class Same(Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Outer(Module):
        def __init__(self) -> None:
            self.same, self.inner = Same(), Named()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.same(self.same(x) + 1))

    class Named(Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).named("mine")

    module = irc.trace(Outer(), SPEC)
    assert [str(a.name) for a in module.main.args] == ["x"]
    assert [v.name for op in module.main for v in op.results] == [None, None, None, "mine"]


def test_models_can_be_traced_again() -> None:
    net = Net(1)
    assert str(irc.trace(net, SPEC)) == str(irc.trace(net, SPEC))


def message_of(model: Any, **inputs: Any) -> str:
    with pytest.raises(irc.Error) as caught:
        irc.trace(model, inputs or SPEC)
    return str(caught.value)


def test_shape_errors_name_line_and_scope() -> None:
    class Wrong(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](F.concat([x, x], -1))

    text = message_of(Wrong())
    assert text.startswith("test_module.py:") and " in blocks.1.up: linear: x is [B, 8]" in text
    assert "\n    linear %_, @blocks.1.up.weight" in text


def test_modules_in_a_plain_list_are_found_out() -> None:
    class Plain(Module):
        def __init__(self) -> None:
            self.layers = [Linear(4, 4)]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    text = message_of(Plain())
    assert "parameter of shape [4, 4] belongs to no part" in text and "ModuleList" in text


def test_a_module_without_forward() -> None:
    class Empty(Module):
        pass

    assert "Empty has no method called forward" in message_of(Empty())
    with pytest.raises(irc.Error, match="Empty has no method called forward"):
        Empty()(1)


def test_a_module_outside_a_trace() -> None:
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
