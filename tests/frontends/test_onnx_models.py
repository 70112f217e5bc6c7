"""A ResNet, a CLIP, a GRU4Rec and a DLRM as torch exports them: computed, sharded, built."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.reference import evaluate
from irc.pipeline import run_pipeline
from tests.frontends.onnx_models import on_ort, read
from tests.frontends.torch_models import MODELS, Example, example

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


@pytest.fixture
def plan(chosen: Example, tmp_path: Path) -> str:
    path = tmp_path / "plan.txt"
    path.write_text("\n".join([*chosen.plan, "megatron"]), encoding="utf-8")
    return str(path)


def agree(results: Iterable[Any], wanted: Iterable[Any], what: str) -> None:
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=what)


def test_what_torch_computes(chosen: Example, path: Path, tmp_path: Path) -> None:
    artifact = irc.compile(path, tmp_path / "out")
    for inputs in (chosen.inputs, chosen.resized(SMALLER)):
        wanted = chosen.computed(inputs)
        agree(on_ort(path, inputs), wanted, "ONNX Runtime")
        agree(evaluate(read(path), inputs, path.parent).values(), wanted, "reference")
        agree(artifact.run(inputs).values(), wanted, "artifact")


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4"])
def test_ranks_agree(chosen: Example, path: Path, plan: str, mesh: str, tmp_path: Path) -> None:
    artifact = irc.compile(path, tmp_path / "out", mesh=mesh, plan=plan)
    for inputs in (chosen.inputs, chosen.resized(SMALLER)):
        agree(artifact.run(inputs).values(), chosen.computed(inputs), mesh)


def test_which_weights_are_sharded(chosen: Example, path: Path, plan: str) -> None:
    module = read(path)
    run_pipeline(module, f'inline, canonicalize, cse, shard{{mesh="tp=2", plan="{plan}"}}')
    for weight in module.weights.values():
        wanted = any(fnmatchcase(weight.name, pattern) for pattern in chosen.sharded)
        assert weight.type.ndim < 2 or weight.type.sharded == wanted, weight  # biases follow
    assert bool(chosen.plan) == any(op.opname == "all_gather" for op in module.ops())


def test_replicas_agree(chosen: Example, path: Path, tmp_path: Path) -> None:
    artifact = irc.compile(path, tmp_path / "out", mesh="dp=2")
    inputs = chosen.resized({"batch": 2, "texts": 2, "images": 2, "ids": 10})
    agree(artifact.run(inputs).values(), chosen.computed(inputs), "dp=2")


@pytest.mark.needs_rtx
@pytest.mark.parametrize("mesh", ["", "tp=2"], ids=["single", "tp=2"])
def test_engines_build(chosen: Example, path: Path, plan: str, mesh: str, tmp_path: Path) -> None:
    dims = {dim: (1, 2, 8) for axes in chosen.axes.values() for dim in axes.values()}
    words: dict[str, Any] = {"mesh": mesh, "plan": plan} if mesh else {}
    artifact = irc.compile(path, tmp_path / "out", backend="tensorrt-rtx", dims=dims, **words)
    assert [*artifact.folder.glob("*.engine")]
