"""Some of the models with one MPI process per rank."""

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
from tests.cli.runner import PROGRAM
from tests.fresh import session_seed
from tests.layout import ROOT
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


@pytest.mark.parametrize(("name", "mesh"), [("tied_prime", "tp=3"), ("five_layers", "pp=2,tp=2")])
def test_models(name: str, mesh: str, tmp_path: Path) -> None:
    module = MODELS[name]()
    ids = prompt_of(module, np.random.default_rng(session_seed()))
    wanted = logits(module, ids, whole_calls=True)
    irc.compile(module, tmp_path / "out", mesh=mesh)
    found = in_processes(tmp_path, {"input_ids": ids})["logits"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.max(np.abs(wanted)))
