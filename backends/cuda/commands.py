"""The part of the backend `cuda` in irc's commands: its plans, its kernels, what it keeps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from irc.analysis.memory import Buffer
from irc.analysis.units import amount
from irc.artifact.folder import ArtifactFolder
from irc.artifact.manifest import Progress
from irc.backends.commands import Benched, Commands, Shown
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dims import checked_sizes
from irc.report import Report, Table

if TYPE_CHECKING:
    from irc.analysis.sizes import LocalSizes
    from irc.analysis.steps import Step as Described
    from irc.analysis.topology import Topology
    from irc.analysis.topology_fit import Measurement
    from irc.backends.cuda.execute.step_times import Timed
    from irc.backends.cuda.plan.build import Planner
    from irc.backends.cuda.plan.core import Plan as Steps
    from irc.backends.cuda.plan.core import Step
    from irc.backends.cuda.plan.regime import Device
    from irc.backends.measure import Plan
    from irc.backends.ranks.communicator import Communicator

WIDTH = 40  # of the column with the operations


class CudaCommands(Commands):
    """Plans of steps, choices of kernels, and compiled kernels."""

    benches: Mapping[str, str] = {
        "kernels": "an artifact of the backend cuda, whose fastest kernels are chosen for this GPU"
    }
    shows: Mapping[str, str] = {"plan": "print what runs on a GPU, with the expected times"}

    def show(self, flag: str, shown: Shown) -> Report:
        """The plans of all stages, at typical sizes or those of `dims`."""
        from irc.backends.cuda.tuning import read_choices

        module, device = shown.module(), read_choices(Path(shown.source)).device
        sizes = checked_sizes(shown.dims, module.dims)
        facts: list[Any] = []
        text: list[str | Table] = []
        for fact, lines in _plans(module, sizes, shown.scope, device):
            facts.append(fact)
            text += lines
        return Report(facts[0] if len(facts) == 1 else facts, text)

    def describe(self, artifact: ArtifactFolder) -> dict[str, str]:
        """The GPU that an artifact is for, and which choices it was measured with."""
        from irc.backends.cuda.facts import CudaFacts
        from irc.backends.cuda.tuning import read_choices

        measured = artifact.facts(CudaFacts).get("choices", "none measured")
        return {"target": str(read_choices(artifact.path).target), "choices": measured}

    def steps(self, module: Module, sizes: LocalSizes, topology: Topology) -> list[Described]:
        """The launches and library calls of the plan of each stage, with the kernels' sources."""
        from irc.backends.cuda.plan.described import described

        plans = _planned(module, sizes.symbols)
        return [step for planned in plans for step in described(*planned, topology)]

    def buffers(self, module: Module, sizes: LocalSizes) -> dict[str, list[Buffer]]:
        """The buffers in the arena of each stage's plan."""
        from irc.backends.cuda.plan.described import arena_of

        plans = _planned(module, sizes.symbols)
        return {plan.function: arena_of(planner, plan) for planner, plan in plans}

    def bench(self, word: str, benched: Benched, progress: Progress) -> Report:
        """A row per choice; they go into the artifact, or as a table of irc into a file."""
        from irc.backends.cuda.execute.load import CudaProgram
        from irc.backends.cuda.execute.step_times import choose
        from irc.backends.cuda.plan_files import write_choices
        from irc.backends.cuda.tuning import FILE, write_shipped

        artifact, program = benched.artifact, benched.program
        parent = Path(benched.file or artifact.path).absolute().parent
        if not os.access(parent, os.W_OK):
            raise Error(
                f"expected a folder that can be written, found {parent}; give -o FILE there"
            )
        if not isinstance(program, CudaProgram):
            raise Error(f"{artifact.path} is compiled for {artifact.backend}, expected cuda")
        choices, rows = choose(benched, program, progress)
        if program.rank.rank == 0 and benched.file:
            write_shipped(Path(benched.file), choices.kernels)
        elif program.rank.rank == 0:
            write_choices(artifact, benched.module, choices)
        file = benched.file or str(artifact.path / FILE)
        return Report(
            {"gpu": choices.gpu, "choices": [vars(row) for row in rows], "file": file},
            [
                f"{choices.gpu}: microseconds of a step",
                Table([_timed(row) for row in rows], _TIMED),
                f"wrote {file}",
            ],
        )

    def device_count(self) -> int:
        """The number of GPUs here."""
        from irc.backends.cuda import runtime

        return runtime.device_count()

    def measure(
        self, plan: Plan, communicator: Communicator, progress: Progress
    ) -> tuple[list[Measurement], str]:
        """The times of collectives over NCCL."""
        from irc.backends.cuda.measure import measure_gpus

        return measure_gpus(plan, communicator, progress)

    def cache(self, folder: Path | None, action: str) -> Report | None:
        """The compiled kernels."""
        from irc.backends.cuda.execute.compile import default_folder, kept

        place = folder / "kernels" if folder else default_folder()
        if place is None:
            return None
        files = {path: path.stat().st_size for path in kept(place)}
        for path in files if action == "clear" else ():
            path.unlink(missing_ok=True)
        size = sum(files.values())
        facts = {"folder": str(place), "files": len(files), "size": size}
        deleted = "deleted " if action == "clear" else ""
        kinds = f"{len(files)} kernels of the backend cuda"
        text = [f"{place}: {deleted}{kinds}, {amount(size)}"] if files else []
        return Report({"kernels": facts}, text)


_TIMED = {
    "what": "{key}",
    "chosen": "{choice}",
    "us": "{us:.1f}",
    "before": "{before}",
    "us ": "{before_us:.1f}",
}


def _timed(row: Timed) -> dict[str, Any]:
    before, us = next(iter(row.us.items()))
    best = {"choice": _short(row.choice), "us": row.us[row.choice]}
    return {"key": row.key, "before": _short(before), "before_us": us, **best}


def _short(name: str) -> str:
    """A name for people, who do not read algorithms in hexadecimal."""
    return name if len(name) < 2 * WIDTH else f"algorithm {crc32(name.encode()):08x}"


def _planned(
    module: Module, given: Mapping[str, int], device: Device | None = None
) -> Iterator[tuple[Planner, Steps]]:
    """The plan of each stage, of its first rank, at given sizes and the typical others."""
    from irc.backends.cuda.facts import sizes_of
    from irc.backends.cuda.plan_files import planners_of

    for planner in planners_of(module, device):
        yield planner, planner.plan(sizes_of(module, planner.function)["typical"] | dict(given))


def _plans(
    module: Module, given: Mapping[str, int], scope: str | None, device: Device
) -> Iterator[tuple[dict[str, str], list[str | Table]]]:
    """The facts and the lines about the plan of each stage."""
    from irc.backends.cuda.plan.text import print_plan

    for planner, plan in _planned(module, given, device):
        lines = _lines(plan, module, scope)
        declined = planner.regime(plan.sizes).launches.declined
        for (name, why), count in Counter((op.opname, why) for op, why in declined).items():
            lines.append(f"  not fused, {count} {name}: {why}")
        yield {"function": plan.function, "text": print_plan(plan)}, lines


_STEPS = {
    "  step": "  {number}",
    "runs": "{runs}",
    "operations": "{operations}",
    "bytes": "{nbytes:bytes}",
    "us": "{us:.1f}",
    "source": "{source}",
}


def _lines(plan: Steps, module: Module, scope: str | None) -> list[str | Table]:
    from irc.analysis.topology_file import default_topology
    from irc.backends.cuda.plan.described import microseconds

    topology = default_topology()
    sizes = ", ".join(f"{name}={size}" for name, size in plan.sizes.items())
    times = [microseconds(plan, step, topology, module.mesh) for step in plan.steps]
    rows = [
        {"number": number, "us": us, **_step(step)}
        for number, (step, us) in enumerate(zip(plan.steps, times, strict=True))
        if scope is None or _in_scope(step, scope)
    ]
    head = (
        f"@{plan.function} at {sizes or 'fixed sizes'}: {len(plan.steps)} steps, "
        f"{sum(times):.1f} us expected on {topology.device.name}; activations {amount(plan.arena)}"
    )
    return [head, Table(rows, _STEPS)]


def _step(step: Step) -> dict[str, Any]:
    from irc.backends.cuda.plan.core import Launch

    names = " ".join(step.operations)
    if isinstance(step, Launch):
        runs = f"{step.kernel} {'x'.join(map(str, step.grid))}, {step.block}"
    else:
        runs = f"{step.library}.{step.function}"
    shown = names if len(names) <= WIDTH else f"{names[: WIDTH - 3]}..."
    return {"runs": runs, "operations": shown, "nbytes": step.work.nbytes, "source": step.source}


def _in_scope(step: Step, scope: str) -> bool:
    path = step.source.partition(" in ")[2]
    return path == scope or path.startswith(scope + ".")
