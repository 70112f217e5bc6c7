"""Compares what a module computes before and after passes, and on every runner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import irc
import irc.passes
from irc.ir.core import Module
from irc.pipeline import Pipeline, parse_pipeline, run_pipeline
from irc.pipeline.instruments import VerifyEach
from irc.pipeline.instruments.numerics import TOLERANCES
from irc.testing.wanted import Arrays, Wanted

assert irc.passes  # importing it registers the passes


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

    def wanted(self) -> Wanted:
        """The results of the module, and how far others may be from them."""
        return Wanted.of(self.module(), self.inputs, TOLERANCES[self.dtype])

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
