"""Random graphs over random meshes by random plans: every pass keeps what the graph computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import irc.passes
from irc.backends.reference import evaluate
from irc.errors import Error
from irc.ir.core import Module
from irc.pipeline import run_pipeline
from irc.text import parse_module
from tests.fresh import session_seed
from tests.sharded.checking import agree
from tests.sharded.graphs import Sharded

assert irc.passes
FUSE = "fuse-collectives{norm=true}"
LOOKUPS = "rewrite-embeddings"
CLEANERS = ("cse", "canonicalize", "fold", "dce", "expand")
PASSES = (LOOKUPS, FUSE, "pipeline", "localize", FUSE, *CLEANERS)
SCHEMES = ("auto", "replicated", "rows", "columns", "cyclic")
CASES = 300
PER_TEST = 20
# Essential words of the Error of a pass that does not apply to a graph.
NOTHING = {LOOKUPS: ("was requested, but",), "pipeline": ("too few", "cannot be cut")}


def asked(name: str, seed: int) -> str:
    """A pass with the options of a case."""
    if name == LOOKUPS:
        return f"{name}{{scheme={SCHEMES[seed % len(SCHEMES)]}}}"
    return f"{name}{{stages={2 + seed // 2 % 2}}}" if name == "pipeline" else name


def applied(name: str, module: Module, seed: int) -> bool:
    """Run a pass, and whether it changed anything."""
    if (name == "localize" and module.mesh.ranks == 1) or (name == "pipeline" and seed % 2):
        return False
    before = str(module)
    try:
        run_pipeline(module, asked(name, seed))
    except Error as error:
        assert any(words in error.message for words in NOTHING.get(name, ())), f"seed {seed}"
        assert str(module) == before, f"seed {seed}: {name} left a partial change"
        return False
    return str(module) != before


def check(seed: int, folder: Path, seen: Counter[str]) -> None:
    """One random case after every pass; `seen` counts those that changed it."""
    case = Sharded(seed)
    inputs = case.inputs(np.random.default_rng(seed))
    wanted = evaluate(case.module, inputs)
    plan = folder / f"plan{seed}.txt"
    plan.write_text("\n".join(case.plan) or "x replicated")
    before = str(case.module)
    what = f"seed {seed} on {case.mesh}"
    try:
        run_pipeline(case.module, f'shard{{mesh="{case.mesh}", plan="{plan}"}}')
    except Error as error:
        if "shards no weight" in error.message or "has no rows" in error.message:
            return
        raise AssertionError(f"{what}: {error}\n{before}\n{case.plan}") from error
    agree(evaluate(case.module, inputs), wanted, 1e-9, f"{what} sharded")
    for name in PASSES:
        if applied(name, case.module, seed):
            seen[name] += 1
            agree(evaluate(case.module, inputs), wanted, 1e-9, f"{what} after {name}")
    text = str(case.module)
    assert str(parse_module(text)) == text


@pytest.mark.parametrize("block", range(CASES // PER_TEST))
def test_sharded_equals_unsharded_after_each_pass(block: int, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for i in range(PER_TEST):
        check(session_seed() * 1000 + block * PER_TEST + i, tmp_path, seen)
    assert seen["localize"]
    print(seen)
