"""The files of an artifact that depend on its choices: these, plans, and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from irc.analysis.stages import stages_of
from irc.artifact.folder import ArtifactFolder
from irc.ir.core import Module

from .facts import sizes_of
from .plan.build import Planner
from .plan.core import Kernel, Plan
from .plan.regime import Device
from .plan.text import print_plan
from .tuning import FILE, Choices

KERNELS, PLANS = "kernels", "plans"  # folders in that of the program


def planners_of(module: Module, device: Device | None = None) -> Iterator[Planner]:
    """What plans each stage of the module, for its first rank."""
    for stage in stages_of(module):
        yield Planner(module, stage.function.name, stage.ranks[0], device=device)


def plans_of(module: Module, device: Device) -> Iterator[tuple[str, Plan]]:
    """A name and a plan per stage of the module, at typical and at least sizes."""
    for planner in planners_of(module, device):
        for name, sizes in sizes_of(module, planner.function).items():
            yield f"{planner.function.name}.{name}", planner.plan(sizes)


def write_plans(module: Module, folder: Path, choices: Choices) -> None:
    """Write choices, the texts of plans with them, and every kernel once."""
    (folder / FILE).write_text(choices.text(), encoding="utf-8")
    kernels: dict[str, Kernel] = {}
    (folder / PLANS).mkdir()
    for name, plan in plans_of(module, choices.device):
        (folder / PLANS / f"{name}.txt").write_text(print_plan(plan), encoding="utf-8")
        kernels |= plan.kernels
    (folder / KERNELS).mkdir()
    for name, kernel in kernels.items():
        (folder / KERNELS / f"{name}.cu").write_text(kernel.text, encoding="utf-8")


def write_choices(artifact: ArtifactFolder, module: Module, choices: Choices) -> None:
    """Put choices into an artifact, and plans with them."""
    facts = {**artifact.program, "choices": choices.summary}
    with artifact.rewritten((FILE, PLANS, KERNELS), facts) as folder:
        write_plans(module, folder, choices)
