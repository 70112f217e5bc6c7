"""The functions that ranks run: the main function, or one per pipeline stage.

The main function of a pipeline is one call per stage, as the pass `pipeline` writes it: a value has
the same name in all functions that take or return it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from irc.errors import Error
from irc.ir.core import Function, Module, Op, Value
from irc.ir.mesh import Mesh

AXIS = "pp"  # the mesh axis of the stages


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
    calls = [op for op in main if _number(op) >= 0]
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
        stage, found = makers[value]
        if stage < 0 or found != name:
            raise Error(
                f"@{main.name} returns {found} as {name}; expected a result of a stage of that name"
            )
    return stages


def _check_calls(mesh: Mesh, main: Function, calls: Sequence[Op]) -> None:
    """An Error unless there is one call per stage, and each state belongs to one of them."""
    found = [_number(op) for op in calls]
    if found != list(range(stage_count(mesh))):
        shown = ", ".join(map(str, found))
        raise Error(
            f"@{main.name} calls stages {shown}, but the mesh is ({mesh}); expected one call each"
        )
    for op in main:
        if op.opname != "return" and _number(op) < 0:
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


def _number(op: Op) -> int:
    """The stage that runs a call, or -1."""
    return getattr(op, "stage", -1) if op.opname == "call" else -1


def stage_axes(mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes of the ranks within one stage."""
    return tuple(name for name in mesh.names if name != AXIS)


def stage_count(mesh: Mesh) -> int:
    """How many stages there are."""
    return mesh.size(AXIS) if AXIS in mesh.names else 1


def _ranks(mesh: Mesh, number: int) -> list[int]:
    """The ranks that run one stage."""
    return [rank for rank in range(mesh.ranks) if mesh.coordinates(rank)[AXIS] == number]
