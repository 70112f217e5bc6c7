"""Networks, modules and arguments by release: names, scopes, source lines, guards."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import functional as F
from irc.frontends import tensorrt_llm as t
from irc.frontends.tensorrt_llm.arithmetic import unwrapped
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.tensor import wrap
from irc.weights import FileRef, UnboundRef

from .worlds import trace


class Scale(t.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = t.Parameter(shape=(size,), dtype="float32")
        self.register_parameter("bias", None)

    def forward(self, x: t.Tensor) -> t.Tensor:
        return x * wrap(unwrapped(self.weight.value))


class Stack(t.Module):
    def __init__(self, depth: int = 2, size: int = 4) -> None:
        super().__init__()
        self.layers = t.ModuleList([Scale(size) for _ in range(depth)])
        self.last = Scale(size)

    def forward(self, x: t.Tensor) -> t.Tensor:
        for layer in self.layers:
            x = layer(x)
            self.register_network_output("hidden", x)
        return self.last(x)


def source() -> t.Tensor:
    return t.Tensor("x", "float32", [-1, 4], OrderedDict(b=[[1, 2, 3]], h=[4]))


def test_guards_nest_and_end_also_after_an_exception() -> None:
    first, second = t.Network(), t.Network()
    with t.net_guard(first):
        x = source()
        with pytest.raises(ZeroDivisionError), t.net_guard(second):
            assert t.default_net() is second
            source()
            raise ZeroDivisionError
        assert t.default_net() is first
        (x + 1.0).mark_output("y")
    with pytest.raises(AssertionError, match="expected a network in progress"):
        t.default_net()
    assert "y" in first.outputs and not second.outputs
    with t.net_guard(second), pytest.raises(irc.Error, match="belongs to another network"):
        _ = x + 1.0
    with t.net_guard(first):  # a second time
        x.mark_output("z")
    assert [each.name for each in first.get_inputs()] == ["x"]
    assert [str(each.type) for each in first.get_outputs()] == ["f32[b, 4]"] * 2


@pytest.mark.parametrize("named", [True, False])
def test_weights_have_the_path_of_their_attribute(named: bool) -> None:
    def build(_: Any) -> None:
        model = Stack()
        if named:
            names = model.named_parameters("transformer")
            t.default_net().set_named_parameters(names)
        model(source()).mark_output("y")

    module = trace(build)
    prefix = "transformer." if named else ""
    paths = ["layers.0.weight", "layers.1.weight", "last.weight"]
    assert list(module.weights) == [prefix + path for path in paths]
    for name, weight in module.weights.items():
        assert weight.ref == UnboundRef(name)
    scopes = [op.loc.scope for op in module.ops() if op.opname == "mul" and op.loc]
    assert scopes == ["layers.0", "layers.1", "last"]
    locs = [op.loc for op in module.ops() if op.opname == "mul"]
    assert all(loc is not None and loc.file == "test_network.py" for loc in locs)


def test_every_weight_has_a_name_of_its_own() -> None:
    def build(_: Any) -> None:
        x = source()
        for value in (2.0, 3.0):
            x = x * t.Parameter(np.full(4, value, np.float32)).value
        for layer in (first := Scale(4), second := Scale(4), Scale(4)):
            x = layer(x)
        for layer in (first, second):
            t.default_net().set_named_parameters(layer.named_parameters())
        x.mark_output("y")

    names = ["constant", "constant_1", "weight", "weight_1", "weight_2"]
    assert list(trace(build).weights) == names


def test_values_may_be_set_after_the_network_is_built() -> None:
    network, model = t.Network(), Stack(1)
    with t.net_guard(network):
        model(source()).mark_output("y")
    random = np.arange(4, dtype=np.float32)
    for parameter in model.parameters():
        parameter.value = random
    with new_session() as session:
        names = [session.add_file("w", Path(f"{i}.safetensors")) for i in (1, 2, 1)]
        assert names == ["w", "w_1", "w"]
        model.last.weight.value = FileRef("w_1", "t")
        module = t.merge({0: network}, Mapping())
        assert module.weights["last.weight"].ref == FileRef("w_1", "t")
        assert module.files["w_1"] == "2.safetensors" and "w" not in module.files


def test_modules_are_listed_by_path() -> None:
    model = Stack()
    wanted = ["", "layers", "layers.0", "layers.1", "last"]
    assert [path for path, _ in model.named_modules()] == wanted
    owners = {path: owner for path, _, owner in model.named_modules_with_parent()}
    assert owners["layers.1"] is model.layers and owners["last"] is model and owners[""] is None
    assert not model.last.weight.is_inited()
    assert [name for name, _ in model.named_children()] == ["layers", "last"]
    assert [path for path, _ in model.last.named_parameters("a")] == ["a.weight"]
    assert [p for p, _ in model.named_parameters(recurse=False)] == []
    assert len(model.layers[:1]) == 1 and isinstance(model.layers[:1], t.ModuleList)
    model.layers[1] = Scale(4)
    assert [path for path, _ in model.named_parameters("m")][1] == "m.layers.1.weight"
    seen: list[Any] = []
    assert model.apply(seen.append) is model
    assert seen[-1] is model and len(seen) == 5
    with t.net_guard(t.Network()):
        model(source())
        ((path, hidden),) = model.named_network_outputs()
        t.default_net()._mark_output(hidden, path, "float16")
        assert str(t.default_net().get_outputs()[0].type) == "f16[b, 4]"


def test_the_network_of_tensorrt_is_read_only() -> None:
    with t.net_guard(t.Network()):
        t.default_trtnet().mark_output(source() + 1.0)
        assert t.default_trtnet().num_layers == 2
        with pytest.raises(irc.Error, match="add_gather of TensorRT's network does not exist"):
            t.default_trtnet().add_gather()


def test_a_dimension_of_one_size_in_its_range_is_static() -> None:
    with t.net_guard(t.Network()):
        rows = t.Tensor("x", "float32", [-1, -1], OrderedDict(b=[1], n=[(1, 2, 3)]))
        assert rows.shape == (1, -1)


def test_lines_of_a_refused_operation_are_those_of_the_script() -> None:
    with t.net_guard(t.Network()), pytest.raises(irc.Error) as error:
        wrap(F.add(unwrapped(source()), unwrapped(t.Tensor("y", "int32", [3]))))
    assert "test_network.py" in str(error.value)
