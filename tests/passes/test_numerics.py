"""Passes keep the numbers of narrow random programs, and of two layers of a Llama."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import irc.passes
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.pipeline.instruments import CheckNumerics, VerifyEach
from irc.pipeline.instruments.numerics import random_inputs, small_sizes
from irc.testing.draw import random_graph
from tests.fresh import fresh, sprinkled
from tests.sharded.models import tiny_llama

assert irc.passes

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXACT = ("canonicalize", "cse", "dce", "inline", "fold")  # the same bits
SEEDS = range(40)


def bits(results: Mapping[str, Any]) -> dict[str, bytes]:
    """The bits of every result, all NaN alike."""
    copies = {name: array.copy() for name, array in results.items()}
    for array in copies.values():
        if array.dtype.kind not in "iub":
            array[np.isnan(array)] = np.nan
    return {name: array.tobytes() for name, array in copies.items()}


def inputs_of(module: Module) -> dict[str, Any]:
    """Random inputs with zeros of both signs, infinities and NaN among them."""
    inputs = random_inputs(module, small_sizes(module))
    return {name: sprinkled(array, fresh(8)) for name, array in inputs.items()}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_exact_passes_keep_every_bit(name: str, dtype: str) -> None:
    done = 0
    for seed in SEEDS:
        module = random_graph(seed, dtype)
        inputs = inputs_of(module)
        before = bits(evaluate(module, inputs))
        (step,) = run_pipeline(module, name)
        done += step.stats.total
        assert bits(evaluate(module, inputs)) == before, f"seed {seed}"
    assert done or name == "inline"


def llama(**sizes: Any) -> Module:
    return tiny_llama(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **HEADS | sizes)


@pytest.mark.parametrize("sizes", [{}, {"qkv_bias": True, "mlp_bias": True}])
def test_a_llama_is_fused(sizes: dict[str, Any]) -> None:
    module = llama(**sizes)
    check = CheckNumerics(evaluate, tolerance=1e-5)
    text = "expand{ops=[gated_mlp]}, fuse-gated-mlp, fuse-qkv, cse, fold, dce"
    run_pipeline(module, text, [VerifyEach(), check])
    kinds = Counter(op.opname for op in module.ops())
    assert (kinds["gated_mlp"], kinds["attention"], kinds["silu"]) == (2, 2, 0)
    # per layer: qkv, the output of the attention, down; and the head
    assert (kinds["linear"], kinds["split"]) == (2 * 3 + 1, 2)
    assert "model.layers.1.self_attn.qkv_proj.weight" in module.weights


@pytest.mark.parametrize("heads", [(6, 3), (8, 2), (6, 1), (7, 7), (12, 2)])
def test_caches_whose_heads_are_padded_are_compared(heads: tuple[int, int]) -> None:
    query, keys = heads
    module = tiny_llama(num_attention_heads=query, num_key_value_heads=keys, head_dim=4)
    check, tp = CheckNumerics(evaluate, tolerance=1e-4), fresh(9).choice([2, 3, 4, 5, 8])
    run_pipeline(module, f'inline, shard{{mesh="tp={tp}"}}, localize, dce', [check])
    last, at = module.main.last, module.main.result_names().index("k1")
    assert last is not None and not check.difference(module)
    values = list(last.operands)
    values[at : at + 2] = values[at + 1], values[at]  # the new values in place of the keys
    last.set_operands(tuple(values))
    assert check.difference(module).startswith("the result k1: ")
