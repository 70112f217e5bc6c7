"""The example scripts: loaded as a user would, run, printed, parsed, and compared with torch."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import huggingface, random_weights
from irc.frontends.script import load_script
from irc.weights.safetensors import Tensors
from tests.cli.runner import run_arrays, works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.models.runners import Runner, program, relative

NAMES = ("llama", "two_tower", "recommender")
LLAMA, TOWERS, RECOMMENDER = (str(ROOT / f"examples/{name}.py") for name in NAMES)
TINY = ROOT / "examples/tiny_llama"


@pytest.mark.parametrize("path", [LLAMA, TOWERS, RECOMMENDER])
def test_examples_round_trip(path: str) -> None:
    module = load_script(path)
    text = str(module)
    assert str(irc.parse(text)) == text and "unbound(" in text


@pytest.mark.parametrize("path", [LLAMA, TOWERS])
def test_random_weights_round_trip(path: str) -> None:
    text = str(random_weights(load_script(path), 3))
    assert str(irc.parse(text)) == text and "unbound(" not in text


def test_keys_of_an_index_are_not_random() -> None:
    with pytest.raises(irc.Error, match=r"the weight table.index.* random keys or positions"):
        random_weights(load_script(RECOMMENDER), 3)


@pytest.mark.parametrize("backend", ["reference", "onnx"])
def test_the_llama_decodes_as_it_prefills(backend: str, tmp_path: Path) -> None:
    compiled = program(random_weights(load_script(LLAMA), 1), backend, tmp_path)
    ids = fresh(0).integers(0, 256, (2, 12))
    whole = Runner(compiled, 2).step(ids)
    prefill, steps = Runner(compiled, 2).decode(ids[:, :5], ids[:, 5:])
    assert relative(np.concatenate([prefill, steps], axis=1), whole) < 1e-5


def test_the_script_is_the_model_of_the_folder(tmp_path: Path) -> None:
    ours = load_script(LLAMA, checkpoint=str(TINY), dtype="f32")
    theirs = huggingface.load(TINY, "f32")
    assert {w.name: str(w.ref) for w in ours.weights.values()} == {
        w.name: str(w.ref) for w in theirs.weights.values()
    }
    ids = np.arange(10, dtype=np.int32)[None]
    one, two = (Runner(program(m, "reference", tmp_path), 1).step(ids) for m in (ours, theirs))
    assert np.array_equal(one, two)


def inputs(items: int) -> dict[str, Any]:
    random = fresh(0)
    return {
        "user_ids": np.array([3, 999], np.int32),
        "history": np.array([[4, 5, -1], [-1, -1, -1]], np.int32),
        "user_features": random.normal(size=(2, 8)).astype(np.float32),
        "item_ids": np.arange(items, dtype=np.int32),
        "item_categories": random.integers(-1, 40, (items, 2)).astype(np.int32),
    }


def test_two_towers_score_by_cosine() -> None:
    out = irc.evaluate(random_weights(load_script(TOWERS, {"widths": "16,8"}), 1), inputs(7))
    assert out["scores"].shape == (2, 7) and out["user"].shape == (2, 8)
    for name in ("user", "item"):
        np.testing.assert_allclose(np.linalg.norm(out[name], axis=-1), 1, rtol=1e-5)
    scores = out["user"] @ out["item"].T
    np.testing.assert_allclose(out["scores"], scores, rtol=1e-5, atol=1e-6)


def test_two_towers_do_not_see_padding() -> None:
    module = random_weights(load_script(TOWERS), 1)
    given = inputs(3)
    longer = given | {"history": np.array([[-1, 4, 5, -1], [-1, -1, -1, -1]], np.int32)}
    other = given | {"history": np.array([[4, 6, -1], [-1, -1, -1]], np.int32)}
    first, padded, changed = (irc.evaluate(module, g)["user"] for g in (given, longer, other))
    np.testing.assert_allclose(first, padded, rtol=1e-5, atol=1e-6)
    assert np.abs(first[0] - changed[0]).max() > 1e-3 and np.array_equal(first[1], changed[1])


FOLDER = ROOT / "examples"
SOURCE = FOLDER / "recommender.py", "--checkpoint", FOLDER / "recommender"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that trained the weights."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("train_recommender")


def in_torch(example: Any) -> Any:
    """The model in torch with the weights of the file; category IDS of each slot is an unseen key,
    whose row is zeros."""
    import torch

    net, arrays = example.Torch(), dict(Tensors(FOLDER / "recommender" / "model.safetensors"))
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
