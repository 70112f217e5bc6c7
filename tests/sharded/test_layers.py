"""Layers and blocks over meshes: after every pass, every rank has the results of the layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from irc.ir.core import Module
from tests.fresh import fresh
from tests.sharded.blocks import BLOCKS
from tests.sharded.cases import drawn, pairs
from tests.sharded.checking import collectives, plan_file, spread
from tests.sharded.layers import LAYERS

CASES = LAYERS | BLOCKS
MESHES = (
    *("tp=2", "tp=3", "tp=4", "tp=6", "tp=8", "ep=2,tp=2", "dp=2,tp=2"),
    *("dp=2", "dp=3,tp=2", "cp=2,tp=3", "ep=3", "dp=2,ep=2,tp=2", "tp=1"),
)
SEQUENCES = ("tp=2", "tp=3", "dp=2,tp=4", "ep=2,tp=3")


def shard(name: str, mesh: str, folder: Path, sequence: bool = False) -> Module:
    """The module of a case after all passes, each of which keeps its results."""
    case = CASES[name]
    module = case.module()
    inputs = drawn(module, fresh(11), **({"S": 12} if sequence else {}))
    plan = plan_file(folder, *case.plan) if case.plan else ""
    spread(module, inputs, mesh, plan=plan, sequence=sequence, tolerance=case.tolerance())
    return module


@pytest.mark.parametrize(("name", "mesh"), pairs(CASES, MESHES, 1))
def test_every_rank_has_the_results_of_the_layer(name: str, mesh: str, tmp_path: Path) -> None:
    assert shard(name, mesh, tmp_path).local


@pytest.mark.parametrize(("name", "mesh"), pairs(CASES, SEQUENCES, 1))
def test_sequence_parallel_layers(name: str, mesh: str, tmp_path: Path) -> None:
    module = shard(name, mesh, tmp_path, sequence=True)
    attention = name in LAYERS and any(op.opname == "attention" for op in module.ops())
    if attention and name != "normed_across":
        assert collectives(module) == {"all_gather": 1, "reduce_scatter": 1}
