"""`irc compile --quantize` and its options, on folders of Llamas with odd sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc as api
from irc.driver import find_source
from tests.cli.runner import irc
from tests.fresh import fresh
from tests.models.golden import write_safetensors
from tests.sharded.models import mixtral
from tests.tiny_checkpoint import write_checkpoint

ODD: dict[str, Any] = {"hidden_size": 120, "intermediate_size": 331, "num_key_value_heads": 1}
LIMITS = {"w8a16": 0.03, "w4a16": 0.35, "fp8": 0.12}  # twice the mean over many models


@pytest.fixture(scope="module", params=[6, 10], ids=["heads_of_20", "heads_of_12"])
def folder(request: Any, tmp_path_factory: Any) -> Path:
    """A Llama of random weights, as transformers initializes them."""
    path = tmp_path_factory.mktemp("odd") / "llama"
    sizes = ODD | {"num_attention_heads": request.param, "eos_token_id": None}
    write_checkpoint(path, **sizes)
    rng = fresh(request.param)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in find_source(path).module.weights.items():
        shape = tuple(int(str(size)) for size in weight.type.shape)
        values = 0.02 * rng.standard_normal(shape, np.float32)
        tensors[name] = values if len(shape) > 1 else np.ones(shape, np.float32)
    write_safetensors(path / "model.safetensors", tensors)
    return path


def logits(artifact: Path, ids: np.ndarray) -> np.ndarray:
    return api.load(artifact).run({"input_ids": ids})["logits"]


@pytest.mark.parametrize("more", [(), ("--kv-cache", "fp8")], ids=["", "kv"])
def test_logits_of_odd_llamas(folder: Path, more: tuple[str, ...], tmp_path: Path) -> None:
    ids = fresh(1).integers(0, 299, (2, 40)).astype(np.int32)
    assert irc("compile", folder, "-o", tmp_path / "base").status == 0
    base = logits(tmp_path / "base", ids)
    for scheme, limit in LIMITS.items():
        found = irc("compile", folder, "-o", tmp_path / scheme, "--quantize", scheme, *more)
        assert found.status == 0, found.err
        error = np.linalg.norm(logits(tmp_path / scheme, ids) - base) / np.linalg.norm(base)
        assert 0 < error < max(limit, 0.06 if more else 0), f"{scheme}: {error}"


def test_generation_with_narrow_caches(folder: Path, tmp_path: Path) -> None:
    """The same tokens in numpy as on ONNX Runtime, except where two are nearly equally likely."""
    out, same = tmp_path / "out", 0
    options = ("--quantize", "w8a16", "--kv-cache", "fp8", "--dims", "C=1:64:64")
    assert irc("compile", folder, "-o", out, *options).status == 0
    for prompt in ("5 6 7", "8 9", "10 11 12 13"):
        words = ("generate", out, "--raw-ids", "--prompt", prompt, "--max-new-tokens", "4")
        found = irc(*words)
        assert found.status == 0 and len(found.out.split()) == 4
        same += irc(*words, "--backend", "reference").out.split()[0] == found.out.split()[0]
    assert same >= 2


def test_options_of_the_command(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "mixed.json"
    table.write_text(json.dumps({"*.mlp.*": "w4a16", "*": "w8a16"}))
    words = ("compile", folder, "--dry-run", "--json", "--explain")
    found = irc(*words, "--quantize", table, "--exclude", "*.v_proj").json
    (row,) = [row for row in found["passes"] if row["pass"].startswith("quantize")]
    assert row["pass"] == (f'quantize{{exclude=["*.v_proj"], table="{table}"}}')
    assert row["did"].startswith("products: 13")  # six of each of two layers, and the head
    assert any("exclude" in note for note in row["notes"])
    plain = irc(*words).json
    assert not any(row["pass"].startswith("quantize") for row in plain["passes"])
    assert found["weight_bytes"] < 0.5 * plain["weight_bytes"]
    every = irc(*words, "--quantize", "w8a16", "--exclude", "").json
    assert any("exclude=[]" in row["pass"] for row in every["passes"])
    # a group of more inputs than there are
    assert irc(*words, "--quantize", "w4a16", "--group", "9999999999").status == 0


def test_a_table_in_python(folder: Path, tmp_path: Path) -> None:
    table = {"*.mlp.*": {"scheme": "w4a16", "group": 60}, "*": None}
    artifact = api.compile(folder, tmp_path / "out", quantize=table)
    kinds = {name: w.type.dtype for name, w in artifact.module.weights.items()}
    assert kinds["model.layers.0.mlp.gate_up_proj.weight"] == "i4"
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "f32"


def test_forecast_and_show(folder: Path, tmp_path: Path) -> None:
    """Weights take less memory, and dequantizing them next to a product takes no kernel."""
    words = ("forecast", folder, "--json", "--mesh", "tp=2")
    plain, quantized = irc(*words).json, irc(*words, "--quantize", "w4a16").json
    sizes = [each["phases"][0]["memory"][0]["weights"] for each in (plain, quantized)]
    assert sizes[1] < 0.6 * sizes[0]
    out = tmp_path / "out"
    assert irc("compile", folder, "-o", out, "--quantize", "nvfp4", "--dry-run").status in (0, 1)
    assert irc("compile", folder, "-o", out, "--quantize", "w4a16").status == 0
    assert "quantized(@ckpt[" in irc("show", out).out


def test_a_scheme_that_the_target_cannot_run(folder: Path) -> None:
    words = ("compile", folder, "--dry-run", "--dtype", "bf16", "--backend", "tensorrt-rtx")
    found = irc(*words, "--quantize", "w4a16_asym")
    assert found.status == 1 and "u4, which TensorRT does not have" in found.err
    assert "schemes that tensorrt-rtx can run: w8a16, w4a16" in found.err
    assert len(found.reports) < 6, "layers alike are counted, not listed"


def test_the_schemes_that_experts_can_have(tmp_path: Path) -> None:
    model = mixtral(4, hidden_size=128, intermediate_size=256, head_dim=32, num_hidden_layers=1)
    engine = {"target": "tensorrt-rtx-1.7/sm_89", "build": False}
    with pytest.raises(api.Error) as caught:
        api.compile(
            model, tmp_path / "out", backend="tensorrt-rtx", quantize="fp8_block", engine=engine
        )
    (line,) = [line for line in str(caught.value).splitlines() if "can run: " in line]
    names = line.partition("can run: ")[2].split(", ")
    assert "fp8_block" not in names and {"fp8", "w8a16"} <= {*names}


def test_an_artifact_is_not_quantized_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert irc("compile", folder, "-o", out, "--mesh", "tp=2", "--quantize", "w8a16").status == 0
    found = irc("compile", out, "-o", tmp_path / "again", "--quantize", "w4a16")
    assert found.status == 1 and "so --quantize has no effect; leave it out" in found.err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"quantize": 8}, "quantize is 8; give the name of a scheme"),
        ({"quantize": "w8a16", "exclude": "*.mlp"}, "exclude is .*give a list of globs"),
        ({"quantize": "w8a16", "include": [3]}, "an entry of include is 3; give a list of globs"),
        ({"quantize": "w8a16", "group": "64"}, "group is '64'; give a number of inputs"),
    ],
)
def test_wrong_types(folder: Path, option: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(api.Error, match=message):
        api.compile(folder, tmp_path / "out", **option)
