"""Whole models: their plans on the host, against the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.base import ports_of, state_shape
from irc.backends.cuda.facts import sizes_of
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.text import print_plan
from irc.backends.cuda.plan_files import KERNELS, PLANS
from irc.backends.cuda.tuning import read_choices
from irc.backends.reference import evaluate
from irc.driver.build import prepare
from irc.ir.core import Module
from irc.text import parse_module
from tests.cli.runner import works
from tests.cuda.run_plan import HostProgram
from tests.ops.compare import Array, assert_close

EXAMPLES = Path(__file__).parents[2] / "examples"


def compiled(folder: Path, **options: Any) -> Module:
    """The example `llama.py` with its tiny checkpoint, as the backend writes it."""
    example, checkpoint = EXAMPLES / "llama.py", EXAMPLES / "tiny_llama"
    irc.compile(example, folder, checkpoint=checkpoint, backend="cuda", **options)
    return parse_module((folder / "module.irc").read_text(encoding="utf-8"))


def tokens(
    rng: np.random.Generator, past: Array, count: int, words: int = 1531
) -> dict[str, Array]:
    """Inputs of one call behind `past` tokens per row."""
    rows = past.size
    return {
        "input_ids": rng.integers(0, words, (rows, count)).astype(np.int32),
        "positions": (past[:, None] + np.arange(count)).astype(np.int32),
        "past_lengths": past,
        "logit_positions": np.full((rows, 1), count - 1, np.int32),
    }


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_prefill_and_decode(mesh: str, rng: np.random.Generator, tmp_path: Path) -> None:
    module = compiled(tmp_path / "out", **({"mesh": mesh} if mesh else {}))
    program = HostProgram(module)
    rows, context = int(rng.integers(1, 4)), 512
    states = {
        name: np.zeros((rows, 2, context, 32), np.float32)
        for name in (str(arg.name) for arg in module.main.args)
        if name[0] in "kv"
    }
    past = np.zeros(rows, np.int32)
    for count in (int(rng.integers(2, 9)), 1, 1):
        inputs = tokens(rng, past, count) | states
        wanted, found = evaluate(module, inputs), program.run(inputs)
        for name, want in wanted.items():
            assert_close(found[name], want, name, factor=20)
        states, past = {name: wanted[name] for name in states}, past + np.int32(count)
    for planner in program.planners:
        plan = planner.plan({"B": rows, "S": 1, "T": 1, "C": context})
        assert not any(getattr(step, "library", "") == "memory" for step in plan.steps)
        assert all(f"launch {name} " in print_plan(plan) for name in plan.kernels)


def test_artifact_and_show(tmp_path: Path) -> None:
    """The folder has the plans and their kernels; `irc show --plan` prints one at any sizes."""
    module = compiled(tmp_path / "out")
    plans = sorted(each.name for each in (tmp_path / "out" / PLANS).iterdir())
    assert plans == ["forward.least.txt", "forward.typical.txt"]
    text = (tmp_path / "out" / PLANS / plans[0]).read_text(encoding="utf-8")
    device = read_choices(tmp_path / "out").device
    assert text == print_plan(
        Planner(module, device=device).plan(sizes_of(module, module.main)["least"])
    )
    kernels = {each.stem for each in (tmp_path / "out" / KERNELS).iterdir()}
    assert kernels >= {line.split()[1] for line in text.splitlines() if " kernel " in line}
    shown = works("show", tmp_path / "out", "--plan", "--dims", "B=3,S=1,T=1").out
    assert "B=3, S=1, T=1, C=512" in shown.splitlines()[0]
    assert "llama.py:65 in lm_head" in shown
    found = works("show", tmp_path / "out", "--plan", "--dims", "B=3,S=1,T=1", "--json").json
    ran = set(found["text"].split())
    assert ran >= {f"%{op.result.name}" for op in module.main if op.opname == "linear"}
    compiled(tmp_path / "stages", mesh="pp=2")
    names = {each.name for each in (tmp_path / "stages" / PLANS).iterdir()}
    assert {"stage0.typical.txt", "stage1.typical.txt"} <= names


CONFIG = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
FAMILIES: dict[str, dict[str, object]] = {
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": True},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 3},
    "MixtralForCausalLM": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 16},
    "Qwen3_5ForCausalLM": {
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "GraniteMoeHybridForCausalLM": {
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 48,
        "num_local_experts": 0,
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "layer_types": ["mamba", "attention"],
    },
}


def decoder_of(
    family: str, folder: Path, sizes: Mapping[str, object], seed: int = 1, **options: Any
) -> Module:
    """A model with random weights, as the backend gets it; `sizes` replaces those of CONFIG."""
    config = {**CONFIG, **FAMILIES[family], **sizes, "architectures": [family]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return prepare(folder, backend="cuda", random_weights=seed, **options).module


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Random models, on one rank or two, behind tokens that random caches hold."""
    mesh = str(rng.choice(["", "tp=2", *(["ep=2"] if family == "MixtralForCausalLM" else [])]))
    dims = {"B": 2, "S": 4, "T": 1, "C": 16}
    module = decoder_of(family, tmp_path, {}, int(rng.integers(1 << 16)), dims=dims, mesh=mesh)
    past = rng.integers(0, 12, 2).astype(np.int32)
    inputs = tokens(rng, past, 4, words=96) | {"lengths": rng.integers(1, 5, 2).astype(np.int32)}
    for port in ports_of(module.main).states:
        shape = state_shape(port, {"B": 2, "C": 16})
        inputs[port.name] = rng.standard_normal(shape).astype(np.float32)
    names = {str(arg.name) for arg in module.main.args}
    inputs = {name: array for name, array in inputs.items() if name in names}
    wanted, found = evaluate(module, inputs), HostProgram(module).run(inputs)
    for name, want in wanted.items():
        assert_close(found[name], want, name, factor=50)
