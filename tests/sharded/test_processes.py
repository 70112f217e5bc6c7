"""Some of the random graphs and models with a real process per rank."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import irc
import irc.passes
from irc.backends.reference import evaluate
from irc.pipeline import run_pipeline
from tests.cli.runner import PROGRAM
from tests.fresh import session_seed
from tests.layout import ROOT
from tests.sharded.graphs import Sharded
from tests.sharded.models import MODELS, logits, prompt_of

assert irc.passes  # importing it registers the passes

LAUNCHER = Path(sys.executable).parent / "mpiexec"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None
    or not (LAUNCHER.exists() or shutil.which("mpiexec")),
    reason="the extra mpi (mpi4py and mpich) is not installed",
)


def in_processes(folder: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of an artifact run by one process per rank."""
    given, made = folder / "in.npz", folder / "out.npz"
    np.savez(given, **inputs)  # pyright: ignore[reportArgumentType]
    words = ["run", str(folder / "out"), "--launcher", "mpi", "--low-memory"]
    files = ["--inputs", str(given), "--outputs", str(made)]
    command = [*PROGRAM, *words, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    with np.load(made) as arrays:
        return dict(arrays)


def graph_on(mesh: str, first: int, folder: Path) -> tuple[Sharded, dict[str, np.ndarray]]:
    """A random graph that is sharded over a mesh, compiled into `folder / "out"`; its inputs."""
    for seed in range(first, first + 200):
        case = Sharded(seed, "f32")
        inputs = case.inputs(np.random.default_rng(seed))
        if case.mesh != mesh or amplifies(seed, inputs):
            continue
        plan = folder / "plan.txt"
        plan.write_text("\n".join(case.plan) or "ids whole")
        try:
            run_pipeline(case.module, f'shard{{mesh="{mesh}", plan="{plan}"}}, localize, cse, dce')
        except irc.Error as error:
            assert "splits no weight" in error.message
            continue
        irc.compile(case.module, folder / "out")
        return case, inputs
    raise AssertionError(f"no seed from {first} on has the mesh {mesh}")


def amplifies(seed: int, inputs: dict[str, np.ndarray]) -> bool:
    """Whether a graph loses digits of f32, so that there is no telling how far results may lie."""
    wide = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in inputs.items()}
    exact = evaluate(Sharded(seed, "f64").module, wide)
    found = evaluate(Sharded(seed, "f32").module, inputs)
    return any(off(found[name], array) > 1e-6 for name, array in exact.items())


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, relative to the largest number."""
    return float(np.max(np.abs(found - wanted), initial=0) / np.max(np.abs(wanted), initial=1))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("mesh", ["tp=2", "ep=2,tp=2"])
def test_random_graphs(mesh: str, number: int, tmp_path: Path) -> None:
    first = session_seed() * 1000 + 400 + 200 * number
    case, inputs = graph_on(mesh, first, tmp_path)
    wanted = evaluate(case.module, inputs)
    found = in_processes(tmp_path, inputs)
    for name, array in wanted.items():
        assert off(found[name], array) <= 4e-5, name


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("gqa", "tp=2"), ("mha_7", "tp=2"), ("tied_prime", "tp=4"), ("five_layers", "pp=2,tp=2")],
)
def test_models(name: str, mesh: str, tmp_path: Path) -> None:
    module = MODELS[name]()
    ids = prompt_of(module, np.random.default_rng(session_seed()))
    wanted = logits(module, ids, whole_calls=True)
    irc.compile(module, tmp_path / "out", mesh=mesh)
    found = in_processes(tmp_path, {"input_ids": ids})["logits"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.max(np.abs(wanted)))
