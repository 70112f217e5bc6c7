"""The part of the backend `cuda` in irc's commands: its plans, its kernels, what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irc.analysis.units import amount
from irc.artifact.manifest import Progress
from irc.backends.commands import Commands, Ranges, Shown
from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dims import checked_ranges
from irc.report import Report, Table

if TYPE_CHECKING:
    from irc.analysis.topology_fit import Measurement
    from irc.backends.cuda.execute.kernel_times import Timed
    from irc.backends.cuda.plan.core import Plan as Steps
    from irc.backends.cuda.plan.core import Step
    from irc.backends.measure import Plan
    from irc.backends.ranks.communicator import Communicator

WIDTH = 40  # of the column with the operations


class CudaCommands(Commands):
    """Plans of steps, times of kernels, and compiled kernels."""

    shows: Mapping[str, str] = {"plan": "print what runs on a GPU, with the expected times"}
    benches: Mapping[str, str] = {
        "kernels": "artifacts of the backend cuda, or modules for it, whose kernels are timed"
    }

    def show(self, flag: str, shown: Shown) -> Report:
        """The plans of all stages, at typical sizes or those of `dims`."""
        module = shown.module()
        facts: list[Any] = []
        text: list[str | Table] = []
        for fact, lines in _plans(module, _sizes(shown.dims, module.dims), shown.scope):
            facts.append(fact)
            text += lines
        return Report(facts[0] if len(facts) == 1 else facts, text)

    def bench(
        self, word: str, modules: Sequence[Module], dims: Ranges, file: str, progress: Progress
    ) -> Report:
        """A row per launch with its fastest kernel; the choices are written."""
        from irc.backends.cuda import tuning
        from irc.backends.cuda.execute.kernel_times import time_kernels

        sizes = {name: typical for name, (_, typical, _) in dims.items()}
        gpu, times = time_kernels(modules, sizes, progress)
        chosen = {each.key: each.choice for each in times}
        if file:
            path = Path(file)
            tuning.write_shipped(path, chosen)
        else:
            kept = tuning.Choices(tuning.file_of_user(), gpu)
            kept.known |= chosen
            kept.save()
            path = kept.path
        rows = [vars(each) | {"choice": each.choice} for each in times]
        nowhere = "there is no folder of your own, so nothing is kept; give -o FILE"
        return Report(
            {"gpu": gpu, "launches": rows, "file": str(path)},
            [
                f"{gpu}: microseconds",
                Table([_timed(each) for each in times], _LAUNCHES),
                f"wrote {path}" if path else nowhere,
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
        """Compiled kernels, and choices by their times."""
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
        kinds = f"{len(files)} kernels and choices of the backend cuda"
        text = [f"{place}: {deleted}{kinds}, {amount(size)}"] if files else []
        return Report({"kernels": facts}, text)


_LAUNCHES = {
    "launch": "{key}",
    "kernel": "{choice}",
    "us": "{us:.2f}",
    "floor": "{floor:.2f}",
    "by the rules": "{rule}",
    "us ": "{rule_us:.2f}",
}


def _timed(timed: Timed) -> dict[str, Any]:
    rule, us = next(iter(timed.us.items()))
    best = {"key": timed.key, "choice": timed.choice, "us": timed.us[timed.choice]}
    return best | {"floor": timed.floor_us, "rule": rule, "rule_us": us}


def _sizes(dims: Ranges, known: Ranges) -> dict[str, int]:
    """The sizes of `--dims`; an Error where a module was not compiled for one."""
    for name, (low, size, high) in checked_ranges(dims, known).items():
        least, _, most = known[name]
        if low != high or not least <= size <= most:
            raise Error(
                f"--plan shows the steps at one size of {name} from {least} to {most}, not "
                f"{low}:{size}:{high}; give another, or compile with another --dims"
            )
    return {name: size for name, (_, size, _) in dims.items()}


def _plans(
    module: Module, given: Mapping[str, int], scope: str | None
) -> Iterator[tuple[dict[str, str], list[str | Table]]]:
    """The facts and the lines about the plan of each stage."""
    from irc.analysis.stages import stages_of
    from irc.backends.cuda.facts import sizes_of
    from irc.backends.cuda.plan.build import Planner
    from irc.backends.cuda.plan.text import print_plan

    for stage in stages_of(module):
        planner = Planner(module, stage.function.name, stage.ranks[0])
        plan = planner.plan({**sizes_of(module, stage.function)["typical"], **given})
        lines = _lines(plan, module, scope)
        declined = planner.launches(plan.sizes).declined
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
    from irc.backends.cuda.plan.cost import microseconds

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
    return {"runs": runs, "operations": shown, "nbytes": step.nbytes, "source": step.source}


def _in_scope(step: Step, scope: str) -> bool:
    path = step.source.partition(" in ")[2]
    return path == scope or path.startswith(scope + ".")
