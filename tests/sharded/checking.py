"""Shards a module pass by pass and compares its results with those of the unsharded module.

In the local view every rank is compared with its shard of the global results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import irc
import irc.passes
from irc.backends.reference import evaluate, evaluate_ranks
from irc.backends.reference.weights import Weights
from irc.ir.core import Module
from irc.ir.layouts import split_array
from irc.pipeline import Stats, run_pipeline
from irc.pipeline.instruments import VerifyEach

assert irc.passes  # importing it registers the passes
Arrays = dict[str, np.ndarray]
BEFORE = "inline, canonicalize, cse"
FUSE = "fuse-collectives{norm=true}"
LOCAL = (FUSE, "fuse-norm", "fuse-qkv", "cse", "canonicalize", "fold", "dce")
AFTER = ("fuse-gated-mlp", FUSE, "localize", *LOCAL)


def spread(
    module: Module,
    inputs: Arrays,
    mesh: str,
    *,
    plan: Path | str = "",
    sequence: bool = False,
    after: Sequence[str] = AFTER,
    tolerance: float = 1e-5,
) -> Stats:
    """Run all passes from the unsharded module to the local view, comparing the results after
    each; the statistics of the pass shard."""
    wanted = evaluate(module, inputs)
    run_pipeline(module, BEFORE)
    options = [f'mesh="{mesh}"', *([f'plan="{plan}"'] if plan else [])]
    options += ["sequence=true"] if sequence else []
    (step,) = run_pipeline(module, f"shard{{{', '.join(options)}}}")
    agree(evaluate(module, inputs), wanted, tolerance, f"sharded over {mesh}")
    weights: Weights | None = None  # they do not change any more in the local view
    for text in after:
        run_pipeline(module, text, [VerifyEach()])
        weights = (weights or Weights(module)) if module.local else None
        check(module, inputs, wanted, f"over {mesh} after {text}", tolerance, weights)
    again = str(module)
    assert str(irc.parse(again)) == again
    return step.stats


def sharded(text: str, mesh: str, plan: Path | str = "") -> tuple[Module, Stats]:
    """The module of a text after the pass shard, and its statistics."""
    module = irc.parse(text)
    more = f', plan="{plan}"' if plan else ""
    (step,) = run_pipeline(module, f'shard{{mesh="{mesh}"{more}}}')
    return module, step.stats


def check(
    module: Module,
    inputs: Arrays,
    wanted: Arrays,
    what: str,
    tolerance: float = 1e-5,
    weights: Weights | None = None,
) -> None:
    """Raise unless the module gives the wanted results, on every rank."""
    if not module.local:
        agree(evaluate(module, inputs), wanted, tolerance, what)
        return
    ranks = evaluate_ranks(module, inputs, weights=weights)
    main = module.main
    for name, layout in zip(
        main.result_names(), [value.type.global_type for value in main.returned], strict=True
    ):
        array, axes = wanted[name], layout.axes
        for number, rank in enumerate(ranks):
            true = split_array(np.ones(array.shape, np.bool_), axes, module.mesh, number)
            mine = split_array(array, axes, module.mesh, number)
            where = f"{what} on rank {number}"
            assert rank[name].shape == mine.shape, f"{where}: {name} is {rank[name].shape}"
            agree({name: rank[name][true]}, {name: mine[true]}, tolerance, where)


def agree(got: Arrays, wanted: Arrays, tolerance: float, what: str) -> None:
    """Results agree to rounding, relative to the largest number; integers in every bit."""
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].shape == array.shape, f"{what}: {name} has the shape {got[name].shape}"
        if array.dtype.kind in "iub":
            assert np.array_equal(got[name], array), f"{what}: {name}"
            continue
        a, b = (x.astype(np.float64) for x in (got[name], array))
        assert np.array_equal(np.isnan(a), np.isnan(b)), f"{what}: {name} is NaN elsewhere"
        assert np.array_equal(a[np.isinf(b)], b[np.isinf(b)]), f"{what}: {name} is infinite"
        known = np.isfinite(b)
        worst = np.max(np.abs(a[known] - b[known]), initial=0)
        largest = max(1, np.max(np.abs(b[known]), initial=0))
        assert worst <= tolerance * largest, f"{what}: {name} is off by {worst}"


def collectives(module: Module) -> dict[str, int]:
    """The number of each collective in a module."""
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_reduce_rms_norm"]
    found = {name: sum(op.opname == name for op in module.ops()) for name in names}
    return {name: count for name, count in found.items() if count}


def plan_file(folder: Path, *rows: str) -> Path:
    """The path of a plan with these rows."""
    path = folder / "plan.txt"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path
