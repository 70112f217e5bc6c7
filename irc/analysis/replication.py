"""Values of a local module that differ between ranks, and whether its results may.

This finds a collective that a pass has lost: types of the local view are plain, so nothing else
shows there that a sum is still partial.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import Error
from ..ir.core import Function, Module, Value
from ..ir.types import TensorType
from ..ops.collective import Collective, Exchange
from ..ops.control import Call
from .blame import Blame
from .frames import Dataflow, Frame, Inputs, Point
from .places import named
from .variation import Names, Variation, Variations


def entries(module: Module) -> list[Function]:
    """The functions without callers: those that a user may run."""
    called = {op.callee for op in module.ops() if isinstance(op, Call)}
    return [function for function in module.functions.values() if function not in called]


def replication(module: Module) -> dict[Value, Names]:
    """The mesh axes over which every value may differ between ranks, in a local module.

    Over every other axis it is replicated. A value of a function with several calls has the axes of
    all of them. An Error where the module is wrong, see `check_replication`.
    """
    found: dict[Value, Names] = {}
    for frame in _followed(module).frames.values():
        for value, variation in frame.variations.items():
            found[value] = found.get(value, frozenset()) | variation.axes
    return found


def check_replication(module: Module) -> None:
    """An Error where values of a local module differ between ranks that should be equal.

    A result may differ over the axes of its layout only. The operand of a sum over an axis must
    differ over it. A partial sum over an axis must not be used as complete.
    """
    _followed(module)


def _followed(module: Module) -> Dataflow:
    if not module.local:
        raise Error(
            f"module @{module.name} is in the global view, where types say what is sharded; "
            "localize it first"
        )
    flow = Dataflow(module, _check_collective)
    for function in entries(module):
        _check_results(flow.entry(function), flow)
    return flow


def _check_results(frame: Frame, flow: Dataflow) -> None:
    function = frame.function
    layouts = zip(function.returned, function.result_layouts(), strict=True)
    for name, (value, layout) in zip(function.result_names(), layouts, strict=True):
        fault = _fault(Point(frame, value), flow.variations.of_type(layout), layout)
        if fault:
            producer = value.producer
            located = producer is not None and producer.loc is not None
            op = producer if located else function.last
            raise Error(f"the result {name} of @{function.name} {fault}", op)


def _fault(point: Point, allowed: Variation, layout: TensorType) -> str:
    """What is wrong with a result that may vary as `allowed` says; empty if nothing is."""
    variation = point.frame.variations[point.value]
    if axis := min(variation.axes - allowed.axes, default=""):
        found = f"may differ between the ranks of {axis}, but its layout says that it does not"
    elif axis := min(variation.broken, default=""):
        return f"is not what its layout {layout} says: {Blame().broken(point, axis)}"
    elif axis := min(variation.partial - allowed.partial, default=""):
        found = f"is a partial sum over {axis}, but its layout is {layout}"
    else:
        return ""
    origin = Blame().differs(point, axis)
    return f"{found}, because {origin.reason}: put {origin.remedy}"


def _check_collective(op: Collective, inputs: Inputs, point: Point, variations: Variations) -> None:
    """Check that summed operands differ, and are computed from complete values."""
    if not op.operands:
        return
    x, over = inputs[0], [axis for axis in op.axes if axis in variations.wide]
    kind: str | None = getattr(op, "op", None)
    if kind in ("sum", "prod") and not x.zero:
        for axis in over:
            if axis not in x.axes:
                raise _repeated(op, axis, variations.mesh.size(axis), point)
    if isinstance(op, Exchange) and op.root_sends:
        return  # the other ranks may hold anything
    wrong = x.broken if kind == "sum" else x.mixed
    for axis in over:
        if axis in x.partial and kind not in (None, "sum"):
            term = _operand(point, lambda variation, axis=axis: axis in variation.partial)
            raise Error(
                f"{named(op)} takes the {kind} of the partial sum over {axis}: "
                f"{Blame().differs(term, axis).reason}; only op=sum completes it",
                point.value.producer,
            )
        if axis in wrong:
            operand = _operand(point, lambda variation, axis=axis: axis in variation.broken)
            raise Error(
                f"{named(op)} has a wrong operand: {Blame().broken(operand, axis)}",
                point.value.producer,
            )


def _repeated(op: Collective, axis: str, group_size: int, point: Point) -> Error:
    """The error about a reduction of a replicated value."""
    x = _operand(point, lambda variation: axis not in variation.axes)
    result = (
        f"{group_size} times the value"
        if op.attributes["op"] == "sum"
        else f"its power of {group_size}"
    )
    return Error(
        f"{named(op)} reduces a value that is the same on all ranks of {axis} already, "
        f"{Blame().same(x, axis)}; that makes {result}: leave it out",
        point.value.producer,
    )


def _operand(point: Point, holds: Callable[[Variation], bool]) -> Point:
    """The operand of a collective, or of its fused operation, that an error is about."""
    frame, value, calls = point
    operands = value.producer.operands if value.producer is not None else ()
    chosen = [v for v in operands if holds(frame.variations[v])] or [*operands]
    return Point(frame, chosen[0], calls)
