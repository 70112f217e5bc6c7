"""Random graphs over random meshes by random plans: every pass keeps what the graph computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import irc.passes
from irc.backends.reference import evaluate
from irc.core import Module
from irc.errors import Error
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.fresh import session_seed
from tests.sharded.graphs import Sharded

assert irc.passes
FUSE = "fuse-collectives{norm=true}"
PASSES = (FUSE, "localize", FUSE, "cse", "canonicalize", "fold", "dce", "expand")
CASES = 200
PER_TEST = 10


def assert_equal(
    got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], what: str, exact: bool = False
) -> None:
    """Results agree to the rounding of f64, amplified; integers in every bit."""
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].shape == array.shape, what
        if exact or array.dtype.kind in "iub":
            assert np.array_equal(got[name], array, equal_nan=True), f"{what}: {name}"
            continue
        worst = np.max(np.abs(got[name] - array), initial=0)
        assert worst <= 1e-9 * max(1, np.max(np.abs(array), initial=0)), f"{what}: {name} {worst}"


def check(seed: int, folder: Path) -> Module:
    """One random case after every pass; the module at the end."""
    case = Sharded(seed)
    inputs = case.inputs(np.random.default_rng(seed))
    wanted = evaluate(case.module, inputs)
    plan = folder / f"plan{seed}.txt"
    plan.write_text("\n".join(case.plan) or "w* whole")
    before = str(case.module)
    what = f"seed {seed} on {case.mesh}"
    try:
        run_pipeline(case.module, f'shard{{mesh="{case.mesh}", plan="{plan}"}}')
    except Error as error:
        if "splits no weight" in error.message or "has no rows" in error.message:
            return case.module
        raise AssertionError(f"{what}: {error}\n{before}\n{case.plan}") from error
    assert_equal(evaluate(case.module, inputs), wanted, f"{what} sharded")
    for name in PASSES:
        if case.module.mesh.ranks == 1 and name == "localize":
            continue
        run_pipeline(case.module, name)
        assert_equal(evaluate(case.module, inputs), wanted, f"{what} after {name}")
    text = str(case.module)
    assert str(parse_module(text)) == text
    return case.module


@pytest.mark.parametrize("block", range(CASES // PER_TEST))
def test_sharded_equals_unsharded_after_each_pass(block: int, tmp_path: Path) -> None:
    found = 0
    for i in range(PER_TEST):
        module = check(session_seed() * 1000 + block * PER_TEST + i, tmp_path)
        found += module.mesh.ranks > 1
    assert found
