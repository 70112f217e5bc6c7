"""A result without dimensions, the count of out-of-range ids, from pipeline stages over MPI."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.text import parse_module
from tests.cli.runner import shell, works
from tests.fresh import fresh
from tests.ranks.worlds import needs_mpi

pytestmark = needs_mpi
LOOKUP = """module @m dims(B=1:3:8) {
  weight @t : f32[13, 4] = random("t", 1, 0.5, [13, 4])
  weight @u : f32[7, 4] = random("u", 1, 0.5, [7, 4])
  func @forward(%ids: i64[B, 3]) -> (y: f32[B, 3, 7]) {
    %e = embedding %ids, @t : f32[B, 3, 4]
    %n = tanh %e : f32[B, 3, 4]
    %y = linear %n, @u : f32[B, 3, 7]
    return %y
  }
}"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages of two ranks, which count the out-of-range ids of a sharded table."""
    folder = tmp_path_factory.mktemp("scalars")
    (folder / "m.irc").write_text(LOOKUP)
    (folder / "plan.txt").write_text("t 0@tp\nu 0@tp\n")
    words = ["--mesh", "pp=2,tp=2", "--plan", folder / "plan.txt", "--outside", "error"]
    works("compile", folder / "m.irc", "-o", folder / "out", *words)
    return folder / "out"


def test_the_count_arrives_from_the_last_stage(artifact: Path, tmp_path: Path) -> None:
    ids = fresh(1).integers(0, 13, (5, 3))
    files = ["--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz"]
    np.savez(tmp_path / "in.npz", ids=ids)
    answer = shell("run", artifact, *files, "--launcher", "mpi")
    assert answer.status == 0, answer.err
    with np.load(tmp_path / "out.npz") as found:
        wanted = evaluate(parse_module(LOOKUP), {"ids": ids})["y"]
        np.testing.assert_allclose(found["y"], wanted, rtol=1e-5, atol=1e-6)
    ids[[0, 2, 4], 1] = 13, -1, 99
    np.savez(tmp_path / "in.npz", ids=ids)
    answer = shell("run", artifact, *files, "--launcher", "mpi")
    assert answer.status == 1
    assert answer.err.count("indices from the input ids are out of range (3 of them)") == 1
