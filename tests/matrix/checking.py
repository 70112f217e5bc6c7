"""Compares what a module computes before and after passes, and on every runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import irc
import irc.passes
from irc.backends.reference import evaluate, evaluate_ranks
from irc.backends.reference.weights import Weights
from irc.ir.core import Module
from irc.ir.layouts import split_array
from irc.pipeline import Pipeline, parse_pipeline, run_pipeline
from irc.pipeline.instruments import VerifyEach
from tests.fresh import fresh

assert irc.passes  # importing it registers the passes
Arrays = Mapping[str, np.ndarray]
NOISE = {"f64": 1e-12, "f32": 1e-5}  # thousands of times the rounding of one operation


@dataclass(frozen=True)
class Case:
    """A module without a mesh, its inputs, and the mesh and rows of a plan to shard it by."""

    text: str
    inputs: Arrays
    mesh: str = "tp=1"
    plan: tuple[str, ...] = ()
    dtype: str = "f64"
    sequence: bool = False

    def module(self) -> Module:
        """A new module."""
        return irc.parse(self.text)

    def shard(self, folder: Path, module: Module) -> str:
        """The pass that shards it, by the rows of what passes have left of it."""
        names = {*module.weights, *(str(arg.name) for arg in module.main.args)}
        rows = [row for row in self.plan if row.partition(" ")[0] in {*names, "megatron"}]
        path = folder / "plan.txt"
        path.write_text("\n".join(rows) or f"{min(names)} replicated", encoding="utf-8")
        return f'shard{{mesh="{self.mesh}", plan="{path}"{", sequence=true" * self.sequence}}}'

    def pipeline(self, text: str, folder: Path) -> str:
        """A pipeline of several ranks with the mesh and the plan filled in."""
        shard = parse_pipeline(self.shard(folder, self.module())).passes[0]
        chosen = (shard if step.name == "shard" else step for step in parse_pipeline(text))
        staged = "pp=" in self.mesh
        return str(Pipeline(tuple(step for step in chosen if staged or step.name != "pipeline")))

    def save(self, folder: Path, done: str) -> Path:
        """Write the module, what was done to it, and its inputs; the path of the module."""
        path = folder / "case.irc"
        head = f"// {done}\n// mesh {self.mesh}\n" + "".join(
            f"// plan {row}\n" for row in self.plan
        )
        path.write_text(head + self.text, encoding="utf-8")
        np.savez(folder / "inputs.npz", allow_pickle=False, **dict(self.inputs))
        return path


@dataclass(frozen=True)
class Wanted:
    """The results of a module without a mesh, and how far others may be from each of them."""

    results: Arrays
    limits: Mapping[str, float]

    @classmethod
    def of(cls, case: Case) -> Wanted:
        """By the reference; the limits follow from what noise in the inputs changes."""
        module, noise, rng = case.module(), NOISE[case.dtype], fresh(1)
        results = evaluate(module, case.inputs)
        noisy: dict[str, np.ndarray] = {}
        for name, x in case.inputs.items():
            factor = 1 + noise * rng.uniform(-1, 1, x.shape) if x.dtype.kind == "f" else 1
            noisy[name] = (x * factor).astype(x.dtype)
        limits: dict[str, float] = {}
        for name, other in evaluate(module, noisy).items():
            a, b = wide(results[name]), wide(other)
            with np.errstate(invalid="ignore", over="ignore"):
                change = np.where(np.isfinite(a), np.abs(a - b), 0)
            largest = np.max(np.abs(a[np.isfinite(a)]), initial=1.0)
            limits[name] = 10 * float(np.max(change, initial=0)) + 10 * noise * float(largest)
        return cls(results, limits)

    @property
    def stable(self) -> bool:
        """Whether noise leaves numbers numbers."""
        return all(np.isfinite(limit) for limit in self.limits.values())

    def check(self, name: str, got: np.ndarray, mine: np.ndarray, what: str) -> None:
        """Raise unless an array, or a rank's shard of one, is the wanted one."""
        what = f"{what}: {name}"
        assert got.shape == mine.shape, f"{what} has the shape {got.shape}, not {mine.shape}"
        if mine.dtype.kind in "iub":
            assert np.array_equal(got, mine), f"{what} is\n{got}, not\n{mine}"
            return
        a, b = wide(got), wide(mine)
        finite = np.isfinite(b)
        same = np.array_equal(a[~finite], b[~finite], equal_nan=True)
        assert same and np.isfinite(a[finite]).all(), f"{what} is\n{got}, not\n{mine}"
        worst = float(np.max(np.abs(a[finite] - b[finite]), initial=0))
        limit = max(self.limits[name], NARROW.get(str(mine.dtype), 0.0))
        assert worst <= limit, f"{what} is off by {worst}, allowed is {limit}"

    def check_all(self, got: Arrays, what: str) -> None:
        """Raise unless all results are the wanted ones."""
        assert got.keys() == self.results.keys(), f"{what}: other results"
        for name, array in self.results.items():
            self.check(name, got[name], array, what)

    def check_module(self, module: Module, inputs: Arrays, what: str) -> None:
        """Raise unless the module gives the wanted results, on every rank of a local one."""
        if not module.local:
            self.check_all(evaluate(module, inputs), what)
            return
        main = module.main
        ranks = evaluate_ranks(module, inputs, weights=Weights(module))
        for name, layout in zip(
            main.result_names(), [value.type.global_type for value in main.returned], strict=True
        ):
            array, axes = self.results[name], layout.axes
            for number, rank in enumerate(ranks):
                true = split_array(np.ones(array.shape, np.bool_), axes, module.mesh, number)
                mine, got = split_array(array, axes, module.mesh, number), rank[name]
                where = f"{what} on rank {number}"
                assert got.shape == mine.shape, f"{where}: {name} has the shape {got.shape}"
                self.check(name, got[true], mine[true], where)


NARROW = {"float16": 1e-2, "bfloat16": 1e-1}


def wide(x: np.ndarray) -> np.ndarray:
    """Floats in f64."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def transformed(case: Case, pipeline: str) -> Module:
    """A new module of a case after a pipeline, verified after each pass."""
    module = case.module()
    run_pipeline(module, pipeline, [VerifyEach()])
    return module


def check_text(module: Module) -> None:
    """Raise unless a module can be printed and read again."""
    text = str(module)
    assert str(irc.parse(text)) == text, "printed and parsed, the module is another"


def without(case: Case, **changes: Any) -> Case:
    """The case with some fields changed."""
    return replace(case, **changes)
