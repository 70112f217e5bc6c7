"""Every pass keeps the numbers: random programs and two layers of a Llama, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import irc.passes
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.pipeline import PASSES, Stats, run_pipeline
from irc.pipeline.instruments import CheckNumerics, VerifyEach
from irc.pipeline.instruments.numerics import random_inputs, small_sizes
from irc.text import parse_module
from tests.passes.random_graphs import random_graph
from tests.sharded.models import tiny_llama

assert irc.passes

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXACT = ("canonicalize", "cse", "dce", "inline", "fold")  # the same bits
ROUNDING = ("expand", "fuse-gated-mlp", "fuse-linears", "fuse-norm", "fuse-qkv")
SEEDS = range(40)
EVERYTHING = "inline, canonicalize, cse, fuse-gated-mlp, fold, canonicalize, dce, expand, cse, dce"


def bits(results: Mapping[str, Any]) -> dict[str, bytes]:
    """The bits of every result, all NaN alike."""
    found = {name: array.copy() for name, array in results.items()}
    for array in found.values():
        if array.dtype.kind not in "iub":
            array[np.isnan(array)] = np.nan
    return {name: array.tobytes() for name, array in found.items()}


def inputs_of(module: Module) -> dict[str, Any]:
    """Random inputs with zeros of both signs, infinities and NaN among them."""
    inputs = random_inputs(module, small_sizes(module))
    inputs["x"][0] = [0.0, -0.0, np.inf, np.nan]
    return inputs


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_exact_passes_keep_every_bit(name: str, dtype: str) -> None:
    done = 0
    for seed in SEEDS:
        module = random_graph(seed, dtype)
        inputs = inputs_of(module)
        before = bits(evaluate(module, inputs))
        (step,) = run_pipeline(module, name)
        done += step.stats.total
        assert bits(evaluate(module, inputs)) == before, f"seed {seed}"
    assert done > 5 or name == "inline"


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_all_passes_together(dtype: str) -> None:
    done: dict[str, int] = {}
    for seed in SEEDS:
        module = random_graph(seed, dtype)
        check = CheckNumerics(evaluate, tolerance=1e-4 if dtype == "f32" else 2e-2)
        for step in run_pipeline(module, EVERYTHING, [VerifyEach(), check]):
            done[step.pass_.name] = done.get(step.pass_.name, 0) + step.stats.total
        text = str(module)
        assert str(parse_module(text)) == text
    assert all(done[name] for name in PASSES if name not in ("inline", "fuse-qkv") and name in done)
    assert set(done) >= {"canonicalize", "cse", "fuse-gated-mlp", "fold", "dce", "expand"}


@pytest.mark.parametrize("name", [*EXACT, *ROUNDING])
def test_a_second_run_finds_nothing(name: str) -> None:
    for seed in SEEDS:
        module = random_graph(seed)
        run_pipeline(module, name)
        text = str(module)
        (again,) = run_pipeline(module, name)
        assert again.stats.total == 0 and str(module) == text, f"seed {seed}"


def llama(**sizes: Any) -> Module:
    return tiny_llama(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **HEADS | sizes)


def counts(module: Module) -> Stats:
    stats = Stats()
    for op in module.ops():
        stats.count(op.opname)
    return stats


@pytest.mark.parametrize("name", [*EXACT, *ROUNDING])
def test_a_llama_computes_the_same_after_each_pass(name: str) -> None:
    run_pipeline(llama(), name, [VerifyEach(), CheckNumerics(evaluate, tolerance=1e-5)])


@pytest.mark.parametrize("sizes", [{}, {"qkv_bias": True, "mlp_bias": True}])
def test_a_llama_is_fused(sizes: dict[str, Any]) -> None:
    module = llama(**sizes)
    check = CheckNumerics(evaluate, tolerance=1e-5)
    text = "expand{ops=[gated_mlp]}, fuse-gated-mlp, fuse-qkv, cse, fold, dce"
    run_pipeline(module, text, [VerifyEach(), check])
    found = counts(module)
    assert (found["gated_mlp"], found["attention"], found["silu"]) == (2, 2, 0)
    # per layer: qkv, the output of the attention, down; and the head
    assert (found["linear"], found["split"]) == (2 * 3 + 1, 2)
    assert "model.layers.1.self_attn.qkv_proj.weight" in module.weights
