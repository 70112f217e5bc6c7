"""The steps and the buffers of a plan, by the names of values in the module's text."""

from __future__ import annotations

from irc.analysis.communication import message
from irc.analysis.cost import cost_of
from irc.analysis.memory import Buffer
from irc.analysis.sizes import LocalSizes
from irc.analysis.steps import Step
from irc.analysis.topology import Topology
from irc.ir.mesh import Mesh

from .build import Planner
from .core import Launch, LibraryCall, Plan, pointers
from .core import Step as PlanStep


def described(planner: Planner, plan: Plan, topology: Topology) -> list[Step]:
    """The steps of a plan by names of the module's text; the root of one is the operation that
    would take longest alone."""
    local = LocalSizes(planner.module.mesh, plan.sizes)
    regime = planner.regime(plan.sizes)
    names_of = regime.names
    makers = {name: value for value, name in names_of.items()}
    steps: list[Step] = []
    for step in plan.steps:
        values = [makers[name] for name in step.operations if name in makers]
        ops = list(dict.fromkeys(v.producer for v in values if v.producer is not None))
        root = max(ops, key=lambda op: cost_of(op, local).time(topology.device), default=None)
        loc = root.loc if root is not None else None
        scope, where = (loc.scope, loc.where()) if loc is not None else ("", "")
        values = [*(root.results if root is not None else ()), *values]
        names = dict.fromkeys(regime.origins.get(v, names_of[v]) for v in values)
        if isinstance(step, Launch):
            name, source = step.kernel, plan.kernels[step.kernel].text
        else:
            name, source = f"{step.library}.{step.function}", ""
        us = microseconds(plan, step, topology, planner.module.mesh)
        of_root = root.opname if root is not None else "copy", scope, tuple(names)
        rest = tuple(op.opname for op in ops), where, planner.rank
        steps.append(Step(name, *of_root, *rest, us, step.work.nbytes, step.work.flops, source))
    return steps


def arena_of(planner: Planner, plan: Plan) -> list[Buffer]:
    """The buffers in the arena of a plan, with the steps that use them."""
    regime = planner.regime(plan.sizes)
    text = {name: regime.origins.get(value, name) for value, name in regime.names.items()}
    used: dict[str, list[int]] = {}
    for number, step in enumerate(plan.steps):
        for argument in pointers(step):
            used.setdefault(argument.buffer, []).append(number)
    return [
        Buffer(text.get(name, name), used[name][0], used[name][-1], buffer.nbytes, buffer.offset)
        for name, buffer in plan.buffers.items()
        if buffer.place == "arena"
    ]


def microseconds(plan: Plan, step: PlanStep, topology: Topology, mesh: Mesh) -> float:
    """The expected time of a step, the start of its kernel included."""
    device = topology.device
    buffers = [plan.buffers[argument.buffer] for argument in pointers(step)]
    if isinstance(step, LibraryCall) and step.library == "nccl":
        return message(step.function, step.axes, buffers[0].nbytes, mesh, topology).us
    peak = device.peak(buffers[-1].dtype if buffers else "f32")
    return max(step.work.flops / peak, step.work.nbytes / device.hbm_gb_s / 1e3) + device.kernel_us
