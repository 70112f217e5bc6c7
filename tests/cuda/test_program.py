"""Whole models as programs of plans on fake GPUs, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc.passes
from irc.backends.cuda.backend import backend
from irc.backends.reference.program import ReferenceProgram
from irc.ir.core import Module
from irc.ir.mesh import Mesh
from irc.pipeline import run_pipeline
from tests.cuda.fake_cuda import World
from tests.fresh import fresh
from tests.sharded.models import MODELS
from tests.tensorrt.test_runtime import step_of

assert irc.passes


def compiled(name: str, mesh: str) -> Module:
    """A model after the backend's passes."""
    module = MODELS[name]()
    if mesh:
        module.mesh = Mesh.parse(mesh)
    run_pipeline(module, backend.sharded_pipeline if mesh else backend.default_pipeline)
    return module


@pytest.mark.parametrize("mesh", ["", "tp=2", "dp=2", "pp=2", "tp=2,pp=2"])
def test_conversations(mesh: str, tmp_path: Path) -> None:
    module = compiled("tied", mesh)
    world = World(module, tmp_path)
    rng = fresh()
    rows = 2
    steps = [step_of(rows, turn, int(rng.integers(1, 9))) for turn in range(2)]
    right = ReferenceProgram(compiled("tied", "")).open({"B": rows, "C": 32})
    wanted = [right.step(step) for step in steps]

    def work(program: Any) -> Any:
        stream = program.open({"B": rows, "B_dp": rows // 2, "C": 32})
        return [stream.step(step) for step in steps]

    for found in world.of_all(work):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one["logits"], other["logits"], rtol=1e-4, atol=1e-5)
    world.close()
    assert [gpu.driver.memory.used for gpu in world.gpus.values()] == [0] * world.ranks
