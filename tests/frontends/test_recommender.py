"""examples/recommender.py with its trained weights: equal to torch on 1, 2 and 3 ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.weights.safetensors import Tensors
from tests.cli.runner import run_arrays, works
from tests.fresh import fresh
from tests.layout import ROOT

EXAMPLES = ROOT / "examples"
SOURCE = EXAMPLES / "recommender.py", "--checkpoint", EXAMPLES / "recommender"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that trained the weights."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_recommender")


def in_torch(example: Any) -> Any:
    """The model in torch with the weights of the file; category IDS of each slot is an unseen key,
    whose row is zeros."""
    import torch

    net, arrays = example.Torch(), dict(Tensors(EXAMPLES / "recommender" / "model.safetensors"))
    with torch.no_grad():
        for name, value in net.named_parameters():
            if name != "table":
                part, number, kind = name.split(".")
                stored = arrays[f"{part}.layers.{int(number) // 2}.{kind}"]
                value.copy_(torch.from_numpy(stored))
    inside = {name.removeprefix("table."): array for name, array in arrays.items()}
    table = example.model().table.table(inside)
    rows = dict(zip(table.keys.tolist(), table.rows, strict=True))
    keys = example.hashed(np.arange(example.SLOTS)[:, None], np.arange(example.IDS)[None])
    stacked = np.stack([[rows[key] for key in slot] for slot in keys.tolist()])
    padded = np.pad(stacked, ((0, 0), (0, 1), (0, 0)))
    net.table = torch.nn.Parameter(torch.from_numpy(padded))
    return net


@pytest.mark.oracle
def test_the_recommender_equals_torch_on_any_ranks(example: Any, tmp_path: Path) -> None:
    import torch

    dense, ids, _ = example.clicks(fresh(70), 60)
    ids[fresh(71).random(ids.shape) < 0.1] = example.IDS
    keys = example.hashed(np.arange(example.SLOTS)[:, None], ids)
    keys = np.where(ids < 0, example.PADDING, keys)
    with torch.no_grad():
        given = torch.from_numpy(dense), torch.from_numpy(ids)
        wanted = torch.sigmoid(in_torch(example)(*given)).numpy()
    for ranks, options in ((1, ()), (2, ("--embedding", "cd")), (3, ("--embedding", "kd"))):
        mesh = ("--mesh", f"dp={ranks}", *options) if ranks > 1 else ()
        folder = tmp_path / f"{ranks}"
        works("compile", *SOURCE, "-o", folder, *mesh)
        found = run_arrays(folder, tmp_path, dense=dense, keys=keys)["click"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.oracle
def test_the_weights_are_trained(example: Any) -> None:
    import torch

    dense, ids, clicked = example.clicks(fresh(72), 4000)
    with torch.no_grad():
        score = in_torch(example)(torch.from_numpy(dense), torch.from_numpy(ids)).numpy()
    right = ((score > 0) == clicked).mean()
    assert right > 0.8 > max(clicked.mean(), 1 - clicked.mean()) + 0.05, right


@pytest.mark.needs_rtx
@pytest.mark.parametrize("scheme", ["kd", "cd"])
def test_the_recommender_builds_an_engine(scheme: str, tmp_path: Path) -> None:
    mesh = ("--mesh", "dp=2", "--embedding", scheme, "--backend", "tensorrt-rtx")
    works("compile", *SOURCE, "-o", tmp_path / "out", *mesh)
    assert [path.name for path in tmp_path.glob("out/*.engine")]
