"""Layers and blocks over meshes: after every pass, every rank has the results of the layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh import fresh
from tests.sharded.blocks import BLOCKS
from tests.sharded.cases import drawn
from tests.sharded.checking import collectives, plan_file, spread
from tests.sharded.layers import LAYERS

CASES = LAYERS | BLOCKS
MESHES = (
    *("tp=2", "tp=3", "tp=4", "tp=6", "tp=8", "ep=2,tp=2", "dp=2,tp=2"),
    *("dp=2", "dp=3,tp=2", "cp=2,tp=3", "ep=3", "dp=2,ep=2,tp=2", "tp=1"),
)
EACH = 3  # meshes of a case; neighbours in the list of cases have others


def pairs() -> list[tuple[str, str]]:
    """Every case with some of the meshes, every mesh with some of the cases."""
    return [
        (name, MESHES[(i * EACH + k) % len(MESHES)])
        for i, name in enumerate(CASES)
        for k in range(EACH)
    ]


@pytest.mark.parametrize(("name", "mesh"), pairs())
def test_every_rank_has_the_results_of_the_layer(name: str, mesh: str, tmp_path: Path) -> None:
    case = CASES[name]
    module = case.module()
    inputs = drawn(module, fresh(11))
    plan = plan_file(tmp_path, *case.plan) if case.plan else ""
    spread(module, inputs, mesh, plan=plan, tolerance=case.tolerance())
    assert module.local


SEQUENCES = ("tp=2", "tp=3", "dp=2,tp=4", "ep=2,tp=3")


@pytest.mark.parametrize("name", CASES)
def test_sequence_parallel_layers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    module = case.module()
    inputs = drawn(module, fresh(12), S=12)
    plan = plan_file(tmp_path, *case.plan) if case.plan else ""
    mesh = SEQUENCES[list(CASES).index(name) % len(SEQUENCES)]
    spread(module, inputs, mesh, plan=plan, sequence=True, tolerance=case.tolerance())
    attention = name in LAYERS and any(op.opname == "attention" for op in module.ops())
    if attention and name != "normed_across":
        assert collectives(module) == {"all_gather": 1, "reduce_scatter": 1}
