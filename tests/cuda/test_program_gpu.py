"""Programs of plans on real GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from irc.backends.cuda.execute.load import program_of
from irc.backends.reference import ReferenceProgram
from irc.ir.mesh import Mesh
from tests.cuda.gpu_rank import conversation
from tests.cuda.test_program import compiled
from tests.fresh import fresh
from tests.gpu_ranks import needs_gpus, ran

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("programmatic", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
def test_one_gpu(graphs: bool, programmatic: bool, tmp_path: Path) -> None:
    needs_gpus(1)
    module = compiled("gqa", "")
    program = program_of(module, tmp_path, graphs=graphs, programmatic=programmatic)
    wanted = conversation(ReferenceProgram(compiled("gqa", "")))
    np.testing.assert_allclose(conversation(program), wanted, rtol=1e-3, atol=1e-4)
    program.close()


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "dp=2", "tp=2,pp=2", "tp=4"])
def test_several_gpus(mesh: str, tmp_path: Path) -> None:
    ranks = Mesh.parse(mesh).ranks
    needs_gpus(ranks)
    wanted = conversation(ReferenceProgram(compiled("tied", "")))
    status, err = ran(ranks, "tests.cuda.gpu_rank", tmp_path, "tied", mesh)
    assert status == 0, err
    for rank in range(ranks):
        found = np.load(tmp_path / f"logits{rank}.npy")
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_over_ranks(ranks: int, tmp_path: Path) -> None:
    needs_gpus(ranks)
    (tmp_path / "seed").write_text(str(fresh().integers(1 << 30)))
    status, err = ran(ranks, "tests.cuda.gpu_peer_memory", tmp_path, "sums")
    assert status == 0, err


@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_lost_rank_ends_the_others(ranks: int, how: str, tmp_path: Path) -> None:
    needs_gpus(ranks)
    status, _ = ran(ranks, "tests.cuda.gpu_peer_memory", tmp_path, how)
    assert status
    for rank in range(ranks - 1):
        seconds, _, message = (tmp_path / f"lost{rank}").read_text().partition(" ")
        assert float(seconds) < 10
        assert f"rank {ranks - 1}" in message
