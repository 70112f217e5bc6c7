"""If, Loop and recurrences: read where it is known which branch and how often, else refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import irc
from irc.frontends.onnx import import_onnx
from tests.fresh import fresh
from tests.frontends.onnx_models import compared, model, on_emitted, on_ort, saved

X = {"x": fresh(9).standard_normal((3, 4)).astype(np.float32)}
INPUTS = {"x": ("f32", ("B", 4))}
CONSTANTS: dict[str, np.ndarray[Any, Any]] = {
    "yes": np.array(True),
    "no": np.array([False]),
    "two": np.array([2], np.int64),
    "three": np.array(3, np.int64),
    "many": np.array(2**62, np.int64),
    "limit": np.array(20.0, np.float32),
    "half": np.array(0.5, np.float32),
}


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def graph(
    nodes: Sequence[onnx.NodeProto], inputs: str, outputs: str, **initial: Any
) -> onnx.GraphProto:
    """A graph inside a node; an input with a capital letter is a number or a truth value."""
    kinds: dict[str, tuple[int, Any]] = {"I": (TensorProto.INT64, []), "C": (TensorProto.BOOL, [])}
    given = [
        helper.make_tensor_value_info(name, *kinds.get(name[0], (TensorProto.FLOAT, None)))
        for name in inputs.split()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in outputs.split()]
    tensors = [numpy_helper.from_array(array, name) for name, array in initial.items()]
    return helper.make_graph(nodes, "inner", given, results, tensors)


def choice(condition: str) -> list[onnx.NodeProto]:
    """Twice x, or its square; values of both have the same names."""
    then = graph([node("Add", "x x", "v"), node("Neg", "v", "r")], "", "r")
    other = graph(
        [node("Mul", "x x", "v"), node("Add", "v w", "r")], "", "r", w=np.ones(1, np.float32)
    )
    return [node("If", condition, "y", then_branch=then, else_branch=other)]


LENGTH = [node("Shape", "x", "s", start=1), node("Greater", "s two", "long")]
SUM = [node("ReduceSum", "x", "total", keepdims=0), node("Greater", "total half", "large")]


@pytest.mark.parametrize("condition", ["yes", "no", "long", "large", "c"])
def test_if(condition: str, tmp_path: Path) -> None:
    nodes = [*LENGTH, *SUM, *choice(condition)]
    for truth in (True, False):
        inputs, given = dict(INPUTS), dict(X)
        if condition == "c":
            inputs, given = {**INPUTS, "c": ("bool", (1,))}, {**X, "c": np.array([truth])}
        elif not truth:
            given = {"x": -X["x"]}
        path = saved(model(nodes, inputs, ["y"], CONSTANTS), tmp_path)
        module = compared(path, given)
        chooses = any(op.opname == "where" for op in module.ops())
        assert chooses == (condition in ("large", "c"))
        for got, want in zip(on_emitted(module, given, tmp_path), on_ort(path, given), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


def body(*more: onnx.NodeProto, outputs: str, inputs: str = "a") -> onnx.GraphProto:
    nodes = [
        node("Cast", "I", "f", to=TensorProto.FLOAT),
        node("Add", "a f", "sum"),
        node("Mul", "sum x", "product"),
        *more,
    ]
    return graph(nodes, f"I C {inputs}", outputs)


def test_loop(tmp_path: Path) -> None:
    """A state, elements that are stacked, and a state of other sizes in every iteration."""
    longer = node("Concat", "b product", "b2", axis=0)
    inner = body(longer, outputs="C sum b2 product", inputs="a b")
    nodes = [node("Loop", "three yes x x", "y z w", body=inner)]
    compared(saved(model(nodes, INPUTS, ["y", "z", "w"], CONSTANTS), tmp_path), X)


def test_loop_until_a_condition(tmp_path: Path) -> None:
    """While k < 20: k is a constant of each iteration, doubled."""
    nodes = [node("Add", "k k", "k2"), node("Less", "k2 limit", "goes"), node("Add", "a x", "b")]
    loop = node("Loop", "many yes three2 x", "k3 y", body=graph(nodes, "I C k a", "goes k2 b"))
    initial = {**CONSTANTS, "three2": np.array(3.0, np.float32)}
    del initial["half"]
    compared(saved(model([loop], INPUTS, ["k3", "y"], initial), tmp_path), X)


def test_loops_in_loops_and_branches(tmp_path: Path) -> None:
    inner = node("Loop", "two yes a", "d", body=body(outputs="C product"))
    first = [node("Equal", "I two", "third"), *choice("third"), node("Add", "a y", "e")]
    outer = graph([inner, *first, node("Add", "d e", "g")], "I C a", "C g e")
    nodes = [node("Loop", "three  x", "out all", body=outer)]
    nodes[0].input[:] = ["three", "", "x"]
    compared(saved(model(nodes, INPUTS, ["out", "all"], CONSTANTS), tmp_path), X)


WIDER = graph([node("Concat", "x x", "r", axis=0)], "", "r")
NARROW = graph([node("Neg", "x", "r")], "", "r")
REFUSED = {
    r"gives? f32\[2\*B, 4\] and f32\[B, 4\], and which": node(
        "If", "large", "y", then_branch=WIDER, else_branch=NARROW
    ),
    "how often it runs is known only": node("Loop", "n yes x", "y", body=body(outputs="C sum")),
    "whether it goes on after iteration 0": node(
        "Loop",
        "three yes x",
        "y",
        body=graph(
            [node("ReduceMax", "a", "m", keepdims=0), node("Less", "m half", "D")], "I C a", "D a"
        ),
    ),
    "more than 65536 nodes": node("Loop", "many yes x", "y", body=body(outputs="C sum")),
    "body gives 1 values for": node("Loop", "two yes x", "y", body=graph([], "I C a", "C")),
    "graph has 2 inputs, and is given 3": node(
        "Loop", "two yes x", "y", body=graph([], "I C", "C")
    ),
    "NonZero in its graph: irc has no operation": node(
        "Loop", "two yes x", "y", body=body(node("NonZero", "a", "z"), outputs="C z")
    ),
    "no iterations": node("Loop", "two no x", "y w", body=body(outputs="C sum product")),
    "input 0 of If has 2 elements": node("If", "pair", "y", then_branch=NARROW, else_branch=NARROW),
}


@pytest.mark.parametrize("message", list(REFUSED))
def test_what_is_refused(message: str, tmp_path: Path) -> None:
    inputs = {**INPUTS, "n": ("i64", ())}
    initial = {**CONSTANTS, "pair": np.array([True, False])}
    path = saved(model([*SUM, REFUSED[message]], inputs, ["y"], initial), tmp_path)
    with pytest.raises(irc.Error, match=message):
        import_onnx(path)


def test_a_loop_with_a_constant_of_nothing_is_refused(tmp_path: Path) -> None:
    text = "body (int64 i, bool c) => (bool d, float k) { k = Constant() d = Identity(c) }"
    body = onnx.parser.parse_graph(text)
    loop = helper.make_node("Loop", ["n", "more"], ["y"], body=body)
    path = saved(model([loop], {"n": ("i64", ()), "more": ("bool", ())}, ["y"]), tmp_path)
    with pytest.raises(irc.Error, match="how often it runs is known only"):
        import_onnx(path)


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_sequences_of_several_lengths(kind: str, tmp_path: Path) -> None:
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[kind]
    rng = fresh(4)
    given = {
        "w": rng.standard_normal((2, gates * 5, 6)).astype(np.float32),
        "r": rng.standard_normal((2, gates * 5, 5)).astype(np.float32),
    }
    words: dict[str, Any] = {"direction": "bidirectional", "hidden_size": 5}
    node = helper.make_node(kind, ["x", "w", "r", "", "n"], ["y", "h"], **words)
    inputs = {"x": ("f32", (4, 3, 6)), "n": ("i32", (3,))}
    path = saved(model([node], inputs, ["y", "h"], given), tmp_path)
    x = rng.standard_normal((4, 3, 6)).astype(np.float32)
    compared(path, {"x": x, "n": np.array([4, 1, 3], np.int32)})
