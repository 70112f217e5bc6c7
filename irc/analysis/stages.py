"""Checks of pipelined modules: operations that must not be in a stage, or beside stages."""

from __future__ import annotations

from ..errors import Error
from ..ir.core import Function, Module, Op, reached
from ..ops.control import Call
from .fused import collectives, communicates
from .places import named

PIPELINE = "pp"  # the mesh axis along which the stages lie


def stage_of(op: Op) -> int:
    """The stage of a call, -1 for operations of all ranks."""
    return op.stage if isinstance(op, Call) else -1


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
            made = value.producer
            if made is not None and stage_of(made) >= 0:
                raise Error(
                    f"{named(op)} runs on every rank, but only those of stage {stage_of(made)} "
                    f"have %{value.name or '_'}; move it into the function of a stage",
                    op,
                )
