"""`irc run` of an artifact whose lookups overflow, by every launcher, and checks of its files."""

from pathlib import Path

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.cli.runner import irc as command
from tests.cli.runner import npz_files, refused, shell, works
from tests.fresh import fresh
from tests.ranks.worlds import needs_mpi

assert irc.passes  # importing it registers the passes

LOOKUP = """module @m mesh(tp=2) dims(B=1:3:8) {
  weight @t : f32[13@tp, 4] = random("t", 1, 0.5, [13, 4])
  func @forward(%ids: i64[2*B@tp, 3]) -> (y: f32[2*B@tp, 3, 4]) {
    %all = all_gather %ids {axis="tp", dim=0} : i64[2*B, 3]
    %e = embedding %all, @t : f32[2*B, 3, 4]{sum tp}
    %y = reduce_scatter %e {axis="tp", dim=0} : f32[2*B@tp, 3, 4]
    return %y
  }
}"""


@pytest.fixture(scope="module")
def module() -> Module:
    """A lookup in a table with cyclic distribution over two ranks, which have ids of their own."""
    module = parse_module(LOOKUP)
    run_pipeline(module, 'rewrite-embeddings{scheme="KD", capacity=2}, localize, cse, dce')
    return module


@pytest.fixture(scope="module")
def artifact(module: Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact") / "out"
    irc.compile(module, folder)
    return folder


@pytest.mark.parametrize("launcher", ["threads", pytest.param("mpi", marks=needs_mpi)])
def test_every_launcher_runs_the_fallback(
    launcher: str, module: Module, artifact: Path, tmp_path: Path
) -> None:
    ids = fresh(1).integers(0, 13, (10, 3))  # 15 of each rank, and a capacity of 4
    files = npz_files(tmp_path, ids=ids)
    answer = shell("run", artifact, *files, "--launcher", launcher)
    assert answer.status == 0, answer.err
    with np.load(tmp_path / "out.npz") as found:
        assert found["capacity_overflow"] == evaluate(module, {"ids": ids})["capacity_overflow"] > 0
        wanted = evaluate(parse_module(LOOKUP), {"ids": ids})["y"]
        np.testing.assert_array_equal(found["y"], wanted)


def test_show_prints_the_fallback(artifact: Path) -> None:
    text = works("show", artifact).out
    assert "func @exact(" in text and "func @forward(" in text


def test_a_changed_fallback_is_found(module: Module, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    irc.compile(module, folder)
    assert "as compiled: 8 in the folder, 0 with weights" in works("doctor", folder).out
    path = folder / "rank1.exact.onnx"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    wanted = "rank1.exact.onnx was changed after it was compiled"
    assert wanted in command("doctor", folder).out
    assert wanted in refused("run", folder, *npz_files(tmp_path, ids=np.zeros((2, 3), int)))
