"""`irc show --plan`: what a function runs on a GPU, step by step."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..analysis.topology_file import default_topology
from ..analysis.units import amount
from ..errors import Error
from ..ir.dims import checked_ranges
from .arguments import Range
from .console import print_json, table
from .sources import read_module

if TYPE_CHECKING:
    from ..backends.cuda.plan.core import Plan, Step
    from ..ir.core import Module

WIDTH = 40  # of the column with the operations


def show_plans(args: Namespace) -> int:
    """Print the plans of all stages at typical sizes, or those of `--dims`."""
    from ..backends.cuda.facts import sizes_of
    from ..backends.cuda.plan.build import Planner
    from ..backends.cuda.plan.text import print_plan
    from ..backends.onnx.stages import stages_of

    module = read_module(args.source)
    given = _sizes(args.dims, module.dims)
    for stage in stages_of(module):
        planner = Planner(module, stage.function.name, stage.ranks[0])
        sizes = sizes_of(module, stage.function)["typical"]
        plan = planner.plan(sizes | given)
        if args.json:
            print_json({"function": plan.function, "text": print_plan(plan)})
            continue
        _print(plan, module, args.scope)
        declined = planner.launches(plan.sizes).declined
        for (name, why), count in Counter((op.opname, why) for op, why in declined).items():
            print(f"  not fused, {count} {name}: {why}")
    return 0


def _sizes(dims: Mapping[str, Range], known: Mapping[str, Range]) -> dict[str, int]:
    """The sizes of `--dims`; an Error where a module was not compiled for one."""
    for name, (low, size, high) in checked_ranges(dims, known).items():
        least, _, most = known[name]
        if low != high or not least <= size <= most:
            raise Error(
                f"--plan shows the steps at one size of {name} from {least} to {most}, not "
                f"{low}:{size}:{high}; give another, or compile with another --dims"
            )
    return {name: size for name, (_, size, _) in dims.items()}


def _print(plan: Plan, module: Module, scope: str | None) -> None:
    from ..backends.cuda.plan.cost import microseconds

    topology = default_topology()
    sizes = ", ".join(f"{name}={size}" for name, size in plan.sizes.items())
    times = [microseconds(plan, step, topology, module.mesh) for step in plan.steps]
    print(
        f"@{plan.function} at {sizes or 'fixed sizes'}: {len(plan.steps)} steps, "
        f"{sum(times):.1f} us expected on {topology.device.name}; activations {amount(plan.arena)}"
    )
    rows: list[tuple[str, ...]] = [("  step", "runs", "operations", "bytes", "us", "source")]
    for number, (step, time) in enumerate(zip(plan.steps, times, strict=True)):
        if scope is None or _in_scope(step, scope):
            rows.append(_row(number, step, time))
    print(table(rows))


def _row(number: int, step: Step, time: float) -> tuple[str, ...]:
    from ..backends.cuda.plan.core import Launch

    names = " ".join(step.operations)
    shown = names if len(names) <= WIDTH else f"{names[: WIDTH - 3]}..."
    what = (
        f"{step.library}.{step.function}"
        if not isinstance(step, Launch)
        else (f"{step.kernel} {'x'.join(map(str, step.grid))}, {step.block}")
    )
    return f"  {number}", what, shown, amount(step.nbytes), f"{time:.1f}", step.source


def _in_scope(step: Step, scope: str) -> bool:
    path = step.source.partition(" in ")[2]
    return path == scope or path.startswith(scope + ".")
