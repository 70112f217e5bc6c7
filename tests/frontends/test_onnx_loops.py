"""What torch writes with Loop, and recurrent layers, against torch itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper

import irc
from irc.backends.reference import evaluate
from irc.frontends.onnx import import_onnx
from tests.fresh import fresh
from tests.frontends.onnx_models import compared, model, saved
from tests.frontends.torch_models import exported

pytestmark = pytest.mark.oracle
IDS = np.array([1, 2, 4, 5, 4, 3, 2, 9])
BAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "offsets": ({}, {"ids": IDS, "offsets": np.array([0, 3, 3, 6])}),
    "an empty bag at the end": ({}, {"ids": IDS, "offsets": np.array([0, 3, 8])}),
    "last offset": (
        {"include_last_offset": True},
        {"ids": IDS, "offsets": np.array([0, 3, 3, 6, 8])},
    ),
    "bags of one size": ({}, {"ids": IDS.reshape(2, 4)}),
}


def agrees(path: Path, given: dict[str, Any], wanted: list[Any], folder: Path) -> irc.Module:
    """The module of a file, for which reference and artifact give what torch gives."""
    module = import_onnx(path)
    named = {str(arg.name): x for arg, x in zip(module.main.args, given.values(), strict=True)}
    artifact = irc.compile(path, folder / "out")
    for results in (evaluate(module, named, path.parent), artifact.run(named)):
        for got, want in zip(results.values(), wanted, strict=True):
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-5)
    return module


@pytest.mark.parametrize("dynamo", [True, False], ids=["graph", "script"])
@pytest.mark.parametrize(
    ("form", "mode"),
    [
        *(("offsets", mode) for mode in ("sum", "mean", "max")),
        ("an empty bag at the end", "max"),
        ("last offset", "mean"),
        ("bags of one size", "sum"),
        ("weights", "sum"),
        ("any size", "mean"),
    ],
)
def test_bags_of_embeddings(form: str, mode: str, dynamo: bool, tmp_path: Path) -> None:
    torch: Any = import_module("torch")
    words, given = BAGS.get(form) or BAGS["offsets"]
    if form == "weights":
        given = {**given, "weights": fresh(2).standard_normal(8).astype(np.float32)}

    class Bags(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.EmbeddingBag(20, 6, mode=mode, **words)

        def forward(self, ids: Any, offsets: Any = None, weights: Any = None) -> Any:
            return self.table(ids, offsets, weights)

    options: dict[str, Any] = {"dynamo": dynamo}
    if form == "any size" and dynamo:
        axes = [{0: torch.export.Dim(name)} for name in ("N", "B")]
        options["dynamic_shapes"] = dict(zip(("ids", "offsets"), axes, strict=True))
    elif form == "any size":
        options["dynamic_axes"] = {"ids": {0: "N"}, "offsets": {0: "B"}}
    path = tmp_path / "model.onnx"
    wanted = exported(Bags(), given, path, **options)
    agrees(path, given, [wanted], tmp_path)


@pytest.mark.parametrize("dynamo", [True, False], ids=["graph", "script"])
def test_a_loop_that_is_not_quite_one_over_bags_is_refused(dynamo: bool, tmp_path: Path) -> None:
    torch: Any = import_module("torch")

    class Bags(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.EmbeddingBag(20, 6, mode="sum")

        def forward(self, ids: Any, offsets: Any) -> Any:
            return self.table(ids, offsets)

    path = tmp_path / "model.onnx"
    exported(Bags(), BAGS["offsets"][1], path, dynamo=dynamo)
    graph_model = onnx.load(path)
    (loop,) = [node for node in graph_model.graph.node if node.op_type == "Loop"]
    sums = [node for node in loop.attribute[0].g.node if node.op_type in ("Equal", "ReduceSum")]
    sums[0].op_type = {"Equal": "Less", "ReduceSum": "ReduceProd"}[sums[0].op_type]
    onnx.save(graph_model, path)
    with pytest.raises(irc.Error, match=r"SequenceEmpty \(1\)|the start of this Slice depends"):
        import_onnx(path)


def test_a_loop_with_a_constant_of_nothing_is_refused(tmp_path: Path) -> None:
    text = "body (int64 i, bool c) => (bool d, float k) { k = Constant() d = Identity(c) }"
    body = onnx.parser.parse_graph(text)
    loop = helper.make_node("Loop", ["n", "more"], ["y"], body=body)
    path = saved(model([loop], {"n": ("i64", ()), "more": ("bool", ())}, ["y"]), tmp_path)
    with pytest.raises(irc.Error, match="how often it runs is known only"):
        import_onnx(path)


@pytest.mark.parametrize(
    ("kind", "words", "dynamo"),
    [
        ("GRU", {}, True),
        ("GRU", {"bidirectional": True, "num_layers": 2, "batch_first": True}, False),
        ("LSTM", {"batch_first": True}, True),
        ("LSTM", {"bidirectional": True, "bias": False}, False),
        ("RNN", {"nonlinearity": "relu"}, False),
    ],
)
def test_recurrent_layers(kind: str, words: dict[str, Any], dynamo: bool, tmp_path: Path) -> None:
    torch: Any = import_module("torch")
    layer = getattr(torch.nn, kind)(6, 5, **words)
    given = {"x": fresh(8).standard_normal((3, 4, 6)).astype(np.float32)}
    batch = 0 if words.get("batch_first") else 1
    options: dict[str, Any] = {"dynamo": dynamo}
    if dynamo:
        options["dynamic_shapes"] = ({batch: torch.export.Dim("B")},)
    else:
        options["dynamic_axes"] = {"x": {batch: "B"}}
    path = tmp_path / "model.onnx"
    every, last = exported(layer, given, path, **options)
    agrees(path, given, [every, *(last if kind == "LSTM" else [last])], tmp_path)


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


@pytest.mark.parametrize(
    ("words", "shape", "message"),
    [
        ({}, ("S", 3, 6), "over S steps: irc unrolls recurrences of 1 to 1024 steps; export"),
        ({}, (2000, 3, 6), "over 2000 steps"),
        ({"activations": ["Sigmoid", "Affine"]}, (4, 3, 6), "activations Sigmoid, Affine"),
        ({"clip": 1.0}, (4, 3, 6), "clip=1.0 is unknown"),
        ({"direction": "bidirectional"}, (4, 3, 6), "for 2 directions"),
    ],
)
def test_recurrences_that_are_refused(
    words: dict[str, Any], shape: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    given = {"w": np.ones((1, 15, 6), np.float32), "r": np.ones((1, 15, 5), np.float32)}
    node = helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=5, **words)
    path = saved(model([node], {"x": ("f32", shape)}, ["y"], given), tmp_path)
    with pytest.raises(irc.Error) as caught:
        import_onnx(path)
    assert message in str(caught.value)
