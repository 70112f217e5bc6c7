"""Modules and irc.trace: names, scopes, arguments, results, aliases, ranges, errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import Module, ModuleList, Parameter, Tensor
from irc.frontends import functional as F
from irc.frontends.layers import Linear
from irc.frontends.tracer import active
from irc.source import shown_path


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
    with pytest.raises(irc.Error, match=f"test_trace.py:.*{message}"):
        Parameter(shape, dtype)


def test_parameters_with_a_name_in_a_function() -> None:
    table = Parameter((4,), name="table")
    assert list(irc.trace(lambda x: x * table, SPEC).weights) == ["table"]
    twin = Parameter((4,), name="table")
    with pytest.raises(irc.Error, match="two parameters are called 'table'"):
        irc.trace(lambda x: x * table + twin, SPEC)


def test_a_dict_names_the_results() -> None:
    module = irc.trace(lambda x: {"twice": x + x, "same": x}, SPEC)
    assert module.main.name == "forward" and module.main.result_names() == ("twice", "same")
    array = np.ones((2, 4), np.float32)
    assert irc.evaluate(module, {"x": array})["twice"].tolist() == (array * 2).tolist()


def test_names_and_ranges() -> None:
    class TwoTower(Module):
        def forward(self, x: Tensor) -> Tensor:
            return -x

    assert irc.trace(lambda x: (x, -x), SPEC).main.result_names() == ("result0", "result1")
    assert irc.trace(lambda x: -x, SPEC).main.result_names() == ("result0",)
    assert irc.trace(TwoTower(), SPEC).name == "two_tower"
    assert irc.trace(TwoTower(), SPEC, name="other").name == "other"
    module = irc.trace(lambda x: -x, SPEC, dims={"B": (1, 4, 16)})
    assert str(module).startswith("module @lambda dims(B=1:4:16) {")
    module = irc.trace(lambda x: -x, {"x": irc.Spec("f32", ("B", "2*S + 1"))})
    assert str(module.main.args[0].type) == "f32[B, 2*S + 1]"


def test_aliases_are_declared() -> None:
    cache = irc.Spec("f32", ("B", 2, "C", 8))
    new = irc.Spec("f32", ("B", "S", 16))
    module = irc.trace(
        lambda k, new, past: {"k": F.cache_update(k, new, past)},
        {"k": cache, "new": new, "past": irc.Spec("i32", ("B",))},
        aliases={"k": "k"},
    )
    assert module.main.aliases() == {0: 0}
    assert "-> (k: f32[B, 2, C, 8] aliases %k)" in str(module)


def test_an_exception_ends_the_trace() -> None:
    def fails(x: Tensor) -> Tensor:
        assert active() is not None
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        irc.trace(fails, SPEC)
    assert active() is None


def test_a_trace_inside_a_trace() -> None:
    def outer(x: Tensor) -> Tensor:
        irc.trace(lambda x: -x, SPEC)
        return x + 1

    assert [op.opname for op in irc.trace(outer, SPEC).main] == ["full", "add", "return"]


class Pair(Module):
    def forward(self, ids: Tensor, *, lengths: Tensor, mask: Any = None) -> Tensor:
        return ids + lengths


IDS = irc.Spec("i32", ("B",))


def traced(spec: Any = SPEC, model: Any = lambda x: x, **options: Any) -> Callable[[], Any]:
    return lambda: irc.trace(model, spec, **options)


def aliased(result: str, source: str, model: Any = lambda x: {"out": x}) -> Callable[[], Any]:
    return traced(model=model, aliases={result: source})


WRONG: list[tuple[Callable[[], Any], str]] = [
    (
        traced({"idds": IDS}, Pair()),
        "no argument called 'idds'; did you mean 'ids'?; it takes ids, lengths, mask",
    ),
    (traced({"ids": IDS}, Pair()), "Pair.forward needs lengths; describe it in inputs"),
    (traced({"x": "f32"}), "the input x is 'f32'; expected irc.Spec("),
    (traced({"x": irc.Spec("int32", ("B",))}), "the input x: no dtype called 'int32'"),
    (
        traced({"x": irc.Spec("i32", (1.5,))}),  # pyright: ignore[reportArgumentType]
        "the input x: a size is an int or the name of a symbol, not 1.5",
    ),
    (traced(SPEC, 3), "a int is not a model"),
    (traced(dims={"b": (1, 2, 3)}), "the model has no dimension 'b'; did you mean 'B'?; it has B"),
    (
        traced({"x": irc.Spec("i32", ("B", "S"))}, dims={"B": (1, 2, 3)}),
        "dims has no range for S; add 'S': (min, typical, max)",
    ),
    (traced(dims={"B": "4"}), "the range of B is '4'; give (min, typical, max), or one number"),
    (traced(dims={"B": (4, 2, 8)}), "the range B=4:2:8 must be in increasing order"),
    (traced(model=lambda x: None), "the result is None; return a tensor"),
    (traced(model=lambda x: {"y": 3}), "the result is an int"),
    (traced(model=lambda x: ()), "returns no tensors"),
    (traced(model=lambda x: (x, [x])), "result 1 is a list"),
    (aliased("ou", "x"), "there is no result 'ou'; did you mean 'out'?"),
    (aliased("out", "xx"), "there is no input 'xx'; did you mean 'x'?"),
    (
        aliased("out", "x", lambda x: {"out": x[:, 1:]}),
        "the result out is f32[B, 3], but the input x it aliases is f32[B, 4]",
    ),
    (traced(model=lambda x: {"a b": x}), "expected a result name such as logits, found 'a b'"),
    (traced({"a b": IDS}, lambda **k: k), "expected an input name such as input_ids"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_errors_state_what_to_change(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(irc.Error) as caught:
        call()
    assert message in caught.value.message
    assert str(caught.value).startswith(shown_path(__file__) + ":")
