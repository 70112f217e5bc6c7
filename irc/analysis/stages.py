"""Pipeline stages: the functions that ranks run, what these send, and what must not be beside them.

The main function of a pipeline is one call per stage, as the pass `pipeline` writes it: a value has
the same name in all functions that take or return it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import Error
from ..ir.core import Function, Module, Op, Value, reached
from ..ir.mesh import Mesh
from ..ops.control import Call
from .fused import collectives, communicates
from .places import named

PIPELINE = "pp"  # the mesh axis along which the stages lie


def stage_of(op: Op) -> int:
    """The stage of a call, -1 for operations of all ranks."""
    return op.stage if isinstance(op, Call) else -1


class Stages:
    """The calls of a function by stage, of either view; there may be several to a stage."""

    def __init__(self, main: Function) -> None:
        self._main = main
        self._calls: dict[int, list[Op]] = {}
        for op in main:
            if stage_of(op) >= 0:
                self._calls.setdefault(stage_of(op), []).append(op)

    def functions(self) -> list[list[Function]]:
        """The functions of each stage; without stages, the main function."""
        stages = [self._calls[stage] for stage in sorted(self._calls)]
        return [[op.attributes["callee"] for op in calls] for calls in stages] or [[self._main]]

    def transfers(self) -> list[list[Value]]:
        """The values that each sending stage computes and later ones take."""
        sent: dict[int, dict[Value, None]] = {}
        for stage in sorted(self._calls):
            for value in (value for op in self._calls[stage] for value in op.operands):
                maker = value.producer
                if maker is not None and 0 <= stage_of(maker) < stage:
                    sent.setdefault(stage_of(maker), {})[value] = None
        return [list(sent[stage]) for stage in sorted(sent)]


@dataclass
class Stage:
    """One function and the ranks that run it.

    `receives` and `sends` name the values from and to other stages, by the numbers of these.
    """

    function: Function
    ranks: list[int]
    receives: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    sends: dict[int, list[str]] = field(default_factory=dict[int, list[str]])


def stages_of(module: Module, function: Function | None = None) -> list[Stage]:
    """The stages of the main (or another) function in order; one stage if it calls none."""
    main, mesh = module.main if function is None else function, module.mesh
    calls = [op for op in main if stage_of(op) >= 0]
    if not calls:
        return [Stage(main, list(range(mesh.ranks)))]
    _check_calls(mesh, main, calls)
    stages = [Stage(op.attributes["callee"], _ranks(mesh, i)) for i, op in enumerate(calls)]
    makers: dict[Value, tuple[int, str]] = {arg: (-1, str(arg.name)) for arg in main.args}
    for number, (call, stage) in enumerate(zip(calls, stages, strict=True)):
        for value, arg in zip(call.operands, stage.function.args, strict=True):
            source, name = makers[value]
            if arg.name != name:
                raise Error(f"stage {number} takes {name} as {arg.name}; expected one name").at(
                    call
                )
            if source >= 0:
                stage.receives.setdefault(source, []).append(name)
                stages[source].sends.setdefault(number, []).append(name)
        names = stage.function.result_names()
        makers |= {value: (number, name) for value, name in zip(call.results, names, strict=True)}
    for name, value in zip(main.result_names(), main.returned, strict=True):
        stage, other = makers[value]
        if stage < 0 or other != name:
            raise Error(
                f"@{main.name} returns {other} as {name}; expected a stage's result of that name"
            )
    return stages


def _check_calls(mesh: Mesh, main: Function, calls: Sequence[Op]) -> None:
    """An Error unless there is one call per stage, and each state belongs to one of them."""
    stages = [stage_of(op) for op in calls]
    if stages != list(range(mesh.size(PIPELINE) if PIPELINE in mesh.names else 1)):
        shown = ", ".join(map(str, stages))
        raise Error(
            f"@{main.name} calls stages {shown}, but the mesh is ({mesh}); expected one call each"
        )
    for op in main:
        if op.opname != "return" and stage_of(op) < 0:
            raise Error(
                f"{op.opname} is between the calls of stages, and no stage runs it; "
                "make the pass pipeline run after all others"
            ).at(op)
    states = {main.args[at] for at in main.aliases().values()}
    for number, op in enumerate(calls):
        callee: Function = op.attributes["callee"]
        kept = {callee.args[at] for at in callee.aliases().values()}
        for value, arg in zip(op.operands, callee.args, strict=True):
            if (value in states) != (arg in kept):
                raise Error(
                    f"stage {number} takes the state {arg.name}, but does not return it; expected "
                    "every state in one stage"
                ).at(op)


def _ranks(mesh: Mesh, number: int) -> list[int]:
    """The ranks that run one stage."""
    return [rank for rank in range(mesh.ranks) if mesh.coordinates(rank)[PIPELINE] == number]


# -- checks of pipelined modules


def check_stages(module: Module) -> None:
    """An Error where stages communicate other than by operands and results of their calls."""
    if PIPELINE not in module.mesh.names:
        return
    done: set[Function] = set()
    for function in module.functions.values():
        calls = [op for op in function if stage_of(op) >= 0]
        for call in calls:
            for inner in reached(call.attributes["callee"], done):
                _check_inside(inner, call)
        if calls:
            _check_beside(function)


def _check_inside(op: Op, call: Op) -> None:
    stage, name = stage_of(call), call.attributes["callee"].name
    if stage_of(op) >= 0:
        raise Error(
            f"{named(op)} has a stage of its own, but stage {stage} runs it, in @{name}; "
            "stages do not nest",
            op,
        )
    axes = [axis for part in collectives(op) for axis in part.axes] if communicates(op) else []
    if PIPELINE in axes:
        raise Error(
            f"{named(op)} communicates over {'.'.join(axes)}, but only the ranks of stage {stage} "
            f"run @{name}, and the other ranks never take part; leave {PIPELINE} out",
            op,
        )


def _check_beside(function: Function) -> None:
    for op in function:
        if stage_of(op) >= 0 or op.opname == "return":
            continue
        for value in op.operands:
            maker = value.producer
            if maker is not None and stage_of(maker) >= 0:
                raise Error(
                    f"{named(op)} runs on every rank, but only those of stage {stage_of(maker)} "
                    f"have %{value.name or '_'}; move it into the function of a stage",
                    op,
                )
