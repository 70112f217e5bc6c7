"""gpt-oss with experts in MXFP4, against transformers with the weights that it makes of them."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.frontends import huggingface
from irc.weights.safetensors import Tensors, write_tensors

from .cases import SIZES, Case
from .runners import Runner, program
from .test_decoders import check_steps

pytestmark = pytest.mark.oracle
CASE = Case(
    "gpt_oss",
    SIZES
    | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "sliding_window": 7}
    | {"num_local_experts": 3, "num_experts_per_tok": 2},
)
SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]


def quantized(folder: Path) -> Any:
    """A model in transformers with weights of random codes, and its folder with those codes."""
    torch, mxfp4 = import_module("torch"), import_module("transformers.integrations.mxfp4")
    model = CASE.save(folder)
    stored = dict(Tensors(folder / "model.safetensors"))
    random = np.random.default_rng(4)
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = parameter.shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = random.integers(122, 126, blocks.shape[:3], np.uint8)
        floats = mxfp4.convert_moe_packed_tensors(
            torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
        )
        with torch.no_grad():
            parameter.copy_(floats)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    write_tensors(folder / "model.safetensors", stored)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED}
    path.write_text(json.dumps(config))
    return model


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    model = quantized(tmp_path / "model")
    module = huggingface.load(tmp_path / "model")
    up = module.weights["model.layers.0.mlp.experts.up"]
    assert str(up.type) == "f4e2m1[3, 96, 64]" and "strided(bytes(@ckpt, " in str(up.ref)
    down = str(module.weights["model.layers.0.mlp.experts.down"].ref)
    assert down.startswith("bytes(@ckpt, ") and down.endswith("f4e2m1[3, 64, 96])")  # in place
    check_steps(Runner(program(module, "onnx", tmp_path / "built"), 2), model, CASE, [4, 3], 3)
    options = {"backend": "reference", "mesh": "tp=2"}
    built = irc.compile(tmp_path / "model", tmp_path / "two", **options)
    check_steps(Runner(built.program, 2), model, CASE, [5, 3], 2)


def test_blocks_of_another_shape(tmp_path: Path) -> None:
    quantized(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = dict(Tensors(path))
    key = "model.layers.1.mlp.experts.down_proj_blocks"
    write_tensors(path, tensors | {key: tensors[key][:, 1:]})
    with pytest.raises(Error, match=r"\[3, 63, 3, 16\]; expected \[3, 64, 3, 16\] for 64 outputs"):
        huggingface.load(tmp_path)
