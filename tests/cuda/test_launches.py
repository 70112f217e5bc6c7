"""What the default pipelines and fusions make of a step of a decoder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from irc.backends.cuda.plan import Launch
from irc.backends.cuda.plan.build import Planner
from irc.driver.build import prepare
from irc.ir.core import Module

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# rms_norm, q, k and v; rope, caches, attention; o, residual; norm, gate, up; down, residual
LAYER = ["linear_rows", "decode_attention", "linear_rows", "linear_rows", "linear_rows"]


def launches(module: Module, batch: int) -> list[str]:
    """The kernels, without their numbers, and the libraries of a step with one token."""
    plan = Planner(module).plan({"B": batch, "S": 1, "T": 1, "C": 200})
    return [
        re.split("_[0-9a-f]{8}", step.kernel)[0] if isinstance(step, Launch) else step.library
        for step in plan.steps
    ]


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("quantize", ["", "w8a16", "w8a16_fp8", "w4a16"])
@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_launches_of_a_layer(mesh: str, quantize: str, batch: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    module = prepare(
        tmp_path, backend="cuda", random_weights=1, mesh=mesh, quantize=quantize, next_tokens=True
    ).module
    names = launches(module, batch)
    # of more than one row, the norm is a launch in front of the product
    norm = ["rms_norm"] if batch > 1 else []
    # o and down give partial sums; the sums over ranks add the residuals
    total = ["all_reduce"] if mesh else []
    layer = [*norm, *LAYER[:3], *total, *norm, *LAYER[3:], *total]
    layers = ["elementwise", *total, *3 * layer]
    # the tokens whose logits are wanted; norm and head; the likeliest of them
    wanted = "rms_norm" if norm else "elementwise"
    assert names[: len(layers) + 2] == [*layers, wanted, "linear_rows"]
    assert mesh or len(names) == len(layers) + 3


def test_inputs_are_quantized_in_one_launch(tmp_path: Path) -> None:
    """With rms_norm in front of q, k and v and of gate and up."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    module = prepare(
        tmp_path, backend="cuda", random_weights=1, quantize="fp8_rowwise", next_tokens=True
    ).module
    layer = ["quantize_rows", *LAYER[:2], *3 * ["quantize_rows", "linear_rows"]]
    assert launches(module, 3)[1:-3] == 3 * layer
