"""`pipeline`: divides the main function into stages, each run by other ranks."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from irc.analysis.stages import PIPELINE
from irc.analysis.units import amount
from irc.errors import Error
from irc.ir.core import Function, Module, Value, Weight
from irc.ir.mesh import Mesh
from irc.ops.collective import Collective
from irc.pipeline import Compilation, Pass, Stats, register
from irc.rewrite import permit

from .plan import Plan, weights_of
from .split import Splitter, stage_name


@register("pipeline")
class PipelineParallel(Pass):
    """Cuts the main function into @stage0, @stage1, ..., which it calls, for ranks along `pp`.

    Cuts lie between layers, which the module scopes of operations tell, or anywhere where there
    are none. Stages are balanced by arithmetic and bytes of weights; `cuts="4,9"` says instead at
    which layers, counted from 0 in the order in which they begin, the stages after the first begin.
    `stages=0` takes the size of the mesh's axis `pp`; a mesh without one gets it, slowest of all.
    One stage is no cut.

    A value goes from a stage to the next, through those between. Arguments go to every stage that
    uses them, and what is made of them cheaply is made in each. A state belongs to one stage.
    """

    view = "global"

    stages: int = 0
    cuts: str = ""

    def __post_init__(self) -> None:
        begins = _layers_in(self.cuts)
        if self.stages < 0:
            raise Error(f"stages is {self.stages}; give a number of stages, or 0 for that of pp")
        if self.cuts and self.stages and len(begins) != self.stages - 1:
            raise Error(
                f'{self.stages} stages have {self.stages - 1} cuts, but cuts="{self.cuts}" '
                f"has {len(begins)}"
            )

    def configured(self, compilation: Compilation) -> Pass | None:
        mesh = compilation.module.mesh
        size = mesh.size(PIPELINE) if PIPELINE in mesh.names else 1
        return replace(self, stages=size) if size > 1 else None

    def run(self, module: Module, stats: Stats) -> None:
        if module.local:
            raise Error("pipeline works in the global view; put it before localize")
        main, count = module.main, self._count(module.mesh)
        if _is_cut(main, count):
            return
        _check_axis(main)
        if count == 1:
            stats.explain("there is one stage, so nothing is cut")
            return
        taken = next((n for n in map(stage_name, range(count)) if n in module.functions), None)
        if taken is not None:
            raise Error(f"there is a function @{taken} already; rename it")
        plan = Plan(module)
        begins = _layers_in(self.cuts)
        if begins:
            plan.check(begins)
        else:
            begins = plan.balanced(count)
        if main.first is None or not permit("pipeline", main.first):
            return
        _explain(plan, begins, stats)
        stage_of = {op: bisect_right(begins, group) for op, group in plan.groups.place.items()}
        Splitter(module, stage_of, plan.repeated, count).run()
        if PIPELINE not in module.mesh.names:
            module.mesh = Mesh(((PIPELINE, count), *module.mesh.axes))

    def _count(self, mesh: Mesh) -> int:
        """The number of stages."""
        ranks = mesh.size(PIPELINE) if PIPELINE in mesh.names else 0
        wanted = self.stages or (len(_layers_in(self.cuts)) + 1 if self.cuts else 0)
        if ranks and wanted and wanted != ranks:
            raise Error(
                f"there are to be {wanted} stages, but the mesh ({mesh}) has {PIPELINE}={ranks}; "
                "make both alike, or leave stages out"
            )
        return wanted or ranks or 1


def _layers_in(text: str) -> list[int]:
    """The layers in `4,9`."""
    items = [item.strip() for item in text.split(",")] if text else []
    numbers = [int(item) for item in items if item.isdecimal() and len(item) < 10]
    if len(numbers) < len(items) or 0 in numbers or numbers != sorted(set(numbers)):
        raise Error(f'cuts lists layers from 1 on in increasing order, such as "4,9", not {text!r}')
    return numbers


def _is_cut(main: Function, count: int) -> bool:
    """Whether the function is already divided so; an Error if it is divided otherwise."""
    calls = [op for op in main if op.opname == "call" and op.attributes["stage"] >= 0]
    if calls and len(calls) != count:
        raise Error(f"@{main.name} is divided into {len(calls)} stages already, not into {count}")
    return bool(calls)


def _check_axis(main: Function) -> None:
    """An Error if anything is sharded over `pp`: its ranks run different operations."""
    values: dict[Value, None] = dict.fromkeys(main.args)
    for op in main:
        values |= dict.fromkeys((*op.operands, *op.results))
        if isinstance(op, Collective) and PIPELINE in op.axes:
            raise Error(f"{op.opname} works over {PIPELINE}, the axis of the stages", op)
    for value in values:
        if PIPELINE in value.type.partial or any(PIPELINE in axes for axes in value.type.axes):
            raise Error(f"{value!r} is sharded over {PIPELINE}, the axis of the stages")


def _explain(plan: Plan, begins: list[int], stats: Stats) -> None:
    """Count and explain the stages, repeated operations, and weights held twice."""
    stats.count("stages", len(begins) + 1)
    stats.count("transferred", sum(len(plan.alive[begin]) for begin in begins))
    ends = [*begins, plan.groups.count]
    for stage, (begin, end) in enumerate(zip([0, *begins], ends, strict=True)):
        stats.explain(f"@{stage_name(stage)} is {_described(plan, begin, end)}")
    if plan.repeated:
        names = ", ".join(dict.fromkeys(op.opname for op in plan.repeated))
        stats.explain(
            f"computed from arguments alone, so repeated in every stage that uses it: {names}"
        )
    for weight, stages in _shared_weights(plan, begins).items():
        stats.count("shared weights")
        held = " and ".join(f"@{stage_name(stage)}" for stage in stages)
        size = amount(plan.bytes([weight]))
        stats.explain(f"@{weight.name} ({size}) is used, and so held, by {held}")


def _described(plan: Plan, begin: int, end: int) -> str:
    """`layers.0 to layers.3: 31 % of the cost, 1.2 MB of weights; it sends ...`"""
    groups, work = plan.groups, plan.work
    first, last = groups.name(begin), groups.name(end - 1)
    total = sum(layer.price for layer in work) or 1.0
    share = 100 * sum(layer.price for layer in work[begin:end]) / total
    ops = [op for op, group in groups.place.items() if begin <= group < end]
    text = f"{first} to {last}" if first != last else first
    text += f": {share:.0f} % of the cost, {amount(plan.bytes([*weights_of(ops)]))} of weights"
    if end == groups.count:
        return text
    names = ", ".join(f"%{value.name or '_'}: {value.type}" for value in plan.alive[end])
    return f"{text}; it sends {amount(plan.handed[end])} ({names})"


def _shared_weights(plan: Plan, begins: list[int]) -> dict[Weight, list[int]]:
    """The weights that more than one stage uses, and which."""
    users: dict[Weight, dict[int, None]] = {}
    for op, group in plan.groups.place.items():
        for weight in weights_of([op]):
            users.setdefault(weight, {})[bisect_right(begins, group)] = None
    return {weight: sorted(stages) for weight, stages in users.items() if len(stages) > 1}
