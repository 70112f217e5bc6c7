"""Whole models: their plans on the host, against the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc
from irc.backends.cuda.backend import KERNELS, PLANS
from irc.backends.cuda.plan.text import parse_plan, print_plan
from irc.backends.reference import evaluate
from irc.ir.core import Module
from irc.text import parse_module
from tests.cli.runner import works
from tests.cuda.run_plan import HostProgram
from tests.ops.compare import Array, assert_close

EXAMPLES = Path(__file__).parents[2] / "examples"


def compiled(folder: Path, **options: object) -> Module:
    """The example `llama.py` with its tiny checkpoint, as the backend writes it."""
    irc.compile(
        EXAMPLES / "llama.py",
        folder,
        checkpoint=EXAMPLES / "tiny_llama",
        backend="cuda",
        **options,  # type: ignore[arg-type]
    )
    return parse_module((folder / "module.irc").read_text(encoding="utf-8"))


def tokens(module: Module, rng: np.random.Generator, past: Array, count: int) -> dict[str, Array]:
    """Inputs of one call behind `past` tokens per row."""
    rows = past.size
    return {
        "input_ids": rng.integers(0, 1531, (rows, count)).astype(np.int32),
        "positions": (past[:, None] + np.arange(count)).astype(np.int32),
        "past_lengths": past,
        "logit_positions": np.full((rows, 1), count - 1, np.int32),
    }


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_prefill_and_decode(mesh: str, rng: np.random.Generator, tmp_path: Path) -> None:
    module = compiled(tmp_path / "out", **({"mesh": mesh} if mesh else {}))
    program = HostProgram(module)
    rows, context = int(rng.integers(1, 4)), 512
    states = {
        name: np.zeros((rows, 2, context, 32), np.float32)
        for name in (str(arg.name) for arg in module.main.args)
        if name[0] in "kv"
    }
    past = np.zeros(rows, np.int32)
    for count in (int(rng.integers(2, 9)), 1, 1):
        inputs = tokens(module, rng, past, count) | states
        wanted, found = evaluate(module, inputs), program.run(inputs)
        for name, want in wanted.items():
            assert_close(found[name], want, name, factor=20)
        states, past = {name: wanted[name] for name in states}, past + np.int32(count)
    for planner in program.planners:
        plan = planner.plan({"B": rows, "S": 1, "T": 1, "C": context})
        assert not any(getattr(step, "library", "") == "memory" for step in plan.steps)
        assert parse_plan(print_plan(plan), plan.kernels) == plan


def test_artifact_and_show(tmp_path: Path) -> None:
    """The folder has the plans and their kernels; `irc show --plan` prints one at any sizes."""
    module = compiled(tmp_path / "out")
    plans = sorted(each.name for each in (tmp_path / "out" / PLANS).iterdir())
    assert plans == ["forward.least.txt", "forward.typical.txt"]
    text = (tmp_path / "out" / PLANS / plans[0]).read_text(encoding="utf-8")
    kernels = {each.stem for each in (tmp_path / "out" / KERNELS).iterdir()}
    assert kernels >= {line.split()[1] for line in text.splitlines() if " kernel " in line}
    shown = works("show", tmp_path / "out", "--plan", "--dims", "B=3,S=1,T=1").out
    lines = shown.splitlines()
    assert "B=3, S=1, T=1, C=512" in lines[0]
    assert sum("linear" in line for line in lines) == 7 * 4 + 1
    assert any("llama.py:65" in line for line in lines)
    assert sum(op.opname == "linear" for op in module.ops()) == 7 * 4 + 1
