"""Axes that nothing uses, in either view, and along which stages lie."""

import pytest

import irc.passes  # noqa: F401  (registers the passes)
from irc.analysis.idle_axes import idle_axes
from irc.ir.mesh import Mesh
from irc.pipeline import run_pipeline
from tests.sharded.models import MODELS


@pytest.mark.parametrize(
    ("model", "mesh", "passes", "idle"),
    [
        ("gqa", "tp=2", "shard", []),
        ("gqa", "tp=2", "shard, localize", []),
        ("gqa", "dp=2, tp=2", "shard, localize, fold, dce", []),
        ("gqa", "cp=2, tp=2", "shard", ["cp"]),
        ("gqa", "cp=2, tp=2", "shard, localize", ["cp"]),
        ("gqa", "cp=1, tp=2", "shard, localize", []),
        ("gqa", "pp=2, tp=2", "shard, localize", ["pp"]),
        ("gqa", "pp=2, tp=2", "shard, pipeline, localize", []),
        ("gqa", "pp=2", "shard, pipeline", []),
        ("gqa", "dp=2, tp=2", "cse", ["dp", "tp"]),
        ("gqa", "ep=2, tp=2", "shard, localize", []),
    ],
)
def test_what_nothing_uses(model: str, mesh: str, passes: str, idle: list[str]) -> None:
    module = MODELS[model]()
    module.mesh = Mesh.parse(mesh)
    run_pipeline(module, f"inline, cse, {passes}")
    found = idle_axes(module)
    assert [note.partition("mesh axis ")[2].partition(":")[0] for note in found] == idle
    assert ("put pipeline among the passes" in str(found)) == ("pp" in idle)
