"""What torch exports, by either exporter: models and layers computed, sharded, built."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irc
from irc.backends.reference import evaluate
from irc.frontends.onnx import import_onnx
from irc.pipeline import run_pipeline
from tests.fresh import fresh
from tests.frontends.onnx_models import read
from tests.frontends.torch_models import MODELS, Example, example, exported
from tests.sharded.checking import share_of_products

pytestmark = pytest.mark.oracle
SMALLER = {"batch": 2, "texts": 2, "images": 1, "seq": 6, "ids": 9}


@pytest.fixture(scope="module", params=list(MODELS))
def chosen(request: pytest.FixtureRequest) -> Example:
    return example(request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["graph", "script"])
def path(
    request: pytest.FixtureRequest, chosen: Example, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    pytest.importorskip("onnxscript")  # what torch's exporter is written with
    path = tmp_path_factory.mktemp("exports") / "model.onnx"
    chosen.export(path, dynamo=request.param)
    return path


def agree(results: Iterable[Any], wanted: Iterable[Any], what: str) -> None:
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=what)


def computes(path: Path, folder: Path, cases: list[tuple[Any, Any]]) -> irc.Module:
    """The module of a file, which gives what torch gives for inputs, as the artifact does."""
    module, artifact = read(path), irc.compile(path, folder / "out")
    for given, wanted in cases:
        named = {str(arg.name): x for arg, x in zip(module.main.args, given.values(), strict=True)}
        agree(evaluate(module, named, path.parent).values(), wanted, "reference")
        agree(artifact.run(named).values(), wanted, "artifact")
    return module


def test_a_model(chosen: Example, path: Path, tmp_path: Path) -> None:
    resized = chosen.resized(SMALLER)
    given = [(inputs, chosen.computed(inputs)) for inputs in (chosen.inputs, resized)]
    computes(path, tmp_path, given)


def test_a_layer_with_caches(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    chosen, path = example("cached layer"), tmp_path / "model.onnx"
    chosen.export(path, dynamo=True)
    resized = chosen.resized({"batch": 1, "seq": 4, "past": 2})
    given = [(inputs, chosen.computed(inputs)) for inputs in (chosen.inputs, resized)]
    module = computes(path, tmp_path, given)
    assert any(op.loc is not None and op.loc.file.endswith(".py") for op in module.ops())


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4"])
def test_ranks_agree(chosen: Example, path: Path, mesh: str, tmp_path: Path) -> None:
    artifact = irc.compile(path, tmp_path / "out", mesh=mesh)
    for inputs in (chosen.inputs, chosen.resized(SMALLER)):
        agree(artifact.run(inputs).values(), chosen.computed(inputs), mesh)


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_are_sharded_without_a_plan(path: Path, ranks: int) -> None:
    module = read(path)
    run_pipeline(module, f'inline, canonicalize, cse, shard{{mesh="tp={ranks}"}}')
    assert share_of_products(module, ranks) >= 0.95


def test_replicas_agree(chosen: Example, path: Path, tmp_path: Path) -> None:
    artifact = irc.compile(path, tmp_path / "out", mesh="dp=2")
    inputs = chosen.resized({"batch": 2, "texts": 2, "images": 2, "ids": 10})
    agree(artifact.run(inputs).values(), chosen.computed(inputs), "dp=2")


@pytest.mark.needs_rtx
@pytest.mark.parametrize("mesh", ["", "tp=2"], ids=["single", "tp=2"])
def test_engines_build(chosen: Example, path: Path, mesh: str, tmp_path: Path) -> None:
    dims = {dim: (1, 2, 8) for axes in chosen.axes.values() for dim in axes.values()}
    words: dict[str, Any] = {"mesh": mesh} if mesh else {}
    artifact = irc.compile(path, tmp_path / "out", backend="tensorrt-rtx", dims=dims, **words)
    assert [*artifact.folder.glob("*.engine")]


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
    computes(path, tmp_path, [(given, [wanted.numpy()])])


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
    wanted = [every, *(last if kind == "LSTM" else [last])]
    computes(path, tmp_path, [(given, [each.numpy() for each in wanted])])
