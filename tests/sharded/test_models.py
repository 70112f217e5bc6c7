"""Layers and models over meshes: after every pass, every rank has the results of the module."""

from __future__ import annotations

from pathlib import Path

import pytest

import irc.passes
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from tests.fresh import fresh
from tests.sharded.checking import BEFORE, FUSE, collectives, drawn, plan_file, spread
from tests.sharded.layers import LAYERS
from tests.sharded.models import MODELS, check_logits, logits, mixtral, prompt_of

assert irc.passes
MESHES = ("tp=2", "tp=3", "ep=2,tp=2", "dp=2,tp=2", "tp=8", "dp=3", "cp=2,tp=3")
SEQUENCES = ("tp=2", "tp=3", "dp=2,tp=4", "ep=2,tp=3")
DECODERS = [
    *(("gqa", "tp=2"), ("gqa_8_2", "pp=2,tp=2"), ("mha_7", "tp=3"), ("tied_prime", "dp=2,tp=2")),
    *(("vocab_5", "tp=6"), ("five_layers", "pp=3"), ("all_bias", "ep=2,tp=2"), ("ffn_1", "tp=2")),
    *(("mqa", "tp=4"), ("mixtral", "ep=3"), ("mixtral", "dp=2,ep=3"), ("mixtral", "pp=2")),
]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_rank_has_the_results_of_the_layer(name: str, sequence: bool, tmp_path: Path) -> None:
    case, meshes = LAYERS[name], SEQUENCES if sequence else MESHES
    module = case.module()
    inputs = drawn(module, fresh(11), **({"S": 12} if sequence else {}))
    plan = plan_file(tmp_path, *case.plan) if case.plan else ""
    mesh = meshes[list(LAYERS).index(name) % len(meshes)]
    spread(module, inputs, mesh, plan=plan, sequence=sequence, tolerance=case.tolerance())
    if sequence and name in ("heads_6_1", "biases", "cross", "alibi_5"):
        assert collectives(module) == {"all_gather": 1, "reduce_scatter": 1}


def check(module: Module, mesh: str, sequence: bool = False, plan: Path | str = "") -> None:
    """Run all passes, comparing the logits on the way."""
    ids = prompt_of(module, fresh(7))
    wanted = logits(module, ids, sequence)
    more = (", sequence=true" if sequence else "") + (f', plan="{plan}"' if plan else "")
    stages = ", pipeline" if "pp" in mesh else ""
    shard = f'{BEFORE}, shard{{mesh="{mesh}"{more}}}, fuse-gated-mlp{stages}'
    for text in (shard, "localize", FUSE, "fuse-norm, fuse-qkv, cse, fold, dce"):
        run_pipeline(module, text)
        check_logits(logits(module, ids, sequence), wanted, f"{mesh} after {text}")


@pytest.mark.parametrize(("name", "mesh"), DECODERS)
def test_models_over_meshes(name: str, mesh: str) -> None:
    check(mixtral() if name == "mixtral" else MODELS[name](), mesh)


@pytest.mark.parametrize(("name", "mesh"), [("tied", "tp=2"), ("all_bias", "tp=6")])
def test_sequence_parallel_models(name: str, mesh: str) -> None:
    module = MODELS[name]()
    check(module, mesh, sequence=True)
    kinds = {op.opname for op in module.ops()}
    assert {"reduce_scatter", "all_gather"} <= kinds and "all_reduce" not in kinds
