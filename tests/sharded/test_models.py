"""Models over meshes: after every pass they give the logits of the unsharded model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc.passes
from irc.ir.core import Module
from irc.ir.mesh import Mesh
from irc.pipeline import run_pipeline
from tests.fresh import fresh
from tests.sharded.cases import pairs
from tests.sharded.models import MODELS, logits, prompt_of

assert irc.passes
MESHES = ("tp=2", "pp=2,tp=2", "tp=3", "dp=2,tp=2", "tp=4", "pp=3", "tp=6", "ep=2,tp=2", "tp=8")
BEFORE = "inline, canonicalize, cse"
AFTER = ("fuse-collectives{norm=true}", "fuse-norm, fuse-qkv, cse, fold, dce")


def passes(mesh: str, sequence: bool = False, plan: Path | None = None) -> list[str]:
    """Everything from the unsharded module to one rank's text."""
    options = [f'mesh="{mesh}"', *(["sequence=true"] if sequence else [])]
    options += [f'plan="{plan}"'] if plan is not None else []
    stages = ", pipeline" if "pp" in mesh else ""
    shard = f"{BEFORE}, shard{{{', '.join(options)}}}, fuse-gated-mlp{stages}"
    return [shard, "localize", *AFTER]


def check(module: Module, mesh: str, sequence: bool = False, plan: Path | None = None) -> Module:
    """Run all passes, comparing on the way; the module at the end."""
    ids = prompt_of(module, fresh(7))
    wanted = logits(module, ids, sequence)
    for text in passes(mesh, sequence, plan):
        run_pipeline(module, text)
        got = logits(module, ids, sequence)
        worst = np.max(np.abs(got - wanted))
        assert worst <= 1e-5 * np.max(np.abs(wanted)), f"{mesh} after {text}: off by {worst}"
    assert module.local
    return module


@pytest.mark.parametrize(("name", "mesh"), pairs(MODELS, MESHES, 1))
def test_models_over_meshes(name: str, mesh: str) -> None:
    module = MODELS[name]()
    if "pp" in mesh and len(module.main.args) < 4 + 2 * Mesh.parse(mesh).size("pp"):
        pytest.skip("fewer layers than stages")
    check(module, mesh)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=6"])
@pytest.mark.parametrize("name", ["gqa", "tied", "all_bias", "mha_5", "ffn_prime"])
def test_sequence_parallel_models(name: str, mesh: str) -> None:
    module = check(MODELS[name](), mesh, sequence=True)
    kinds = {op.opname for op in module.ops()}
    assert {"reduce_scatter", "all_gather"} <= kinds
    assert "all_reduce" not in kinds
