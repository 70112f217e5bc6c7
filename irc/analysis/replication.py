"""Which values of a local module differ between ranks, and whether its results may.

This is what finds a collective that a pass has lost: the types of the local view are plain, so
nothing else says there that a sum is still to be added up.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core import Function, Module, Value
from ..errors import Error
from ..ops.collective import Collective
from ..ops.control import Call
from .blame import Blame
from .frames import Dataflow, Frame, Inputs, Point
from .places import named
from .variation import Names, Variation, Variations

_ROOT_DECIDES = ("broadcast", "collective_scatter")  # the other ranks may hold anything


def entries(module: Module) -> list[Function]:
    """The functions that no other one calls: what a user may run."""
    called = {op.callee for op in module.ops() if isinstance(op, Call)}
    return [function for function in module.functions.values() if function not in called]


def replication(module: Module) -> dict[Value, Names]:
    """The mesh axes over which every value may differ between ranks, in a local module.

    Over every other axis it is the same on all ranks. A value of a function that is called in
    several ways has the axes of all of them. An Error where the module is wrong, see
    `check_replication`.
    """
    found: dict[Value, Names] = {}
    for frame in _followed(module).frames.values():
        for value, variation in frame.variations.items():
            found[value] = found.get(value, frozenset()) | variation.axes
    return found


def check_replication(module: Module) -> None:
    """An Error where the ranks of a local module disagree on what they should have in common.

    A result may differ over the axes of its layout only. What is summed over an axis must differ
    over it. What is still to be added up over an axis must not be taken for complete.
    """
    _followed(module)


def _followed(module: Module) -> Dataflow:
    if not module.local:
        raise Error(
            f"module @{module.name} is in the global view, where types say what is split; "
            "localize it first"
        )
    flow = Dataflow(module, _check_collective)
    for function in entries(module):
        _check_results(flow.entry(function), flow)
    return flow


def _check_results(frame: Frame, flow: Dataflow) -> None:
    function = frame.function
    rows = zip(
        function.result_names(),
        function.returned,
        frame.returned,
        function.result_layouts(),
        strict=True,
    )
    for name, value, variation, layout in rows:
        allowed = flow.variations.of_type(layout)
        if variation is allowed:
            continue
        where = f"the result {name} of @{function.name}"
        for axis in sorted(variation.axes - allowed.axes):
            raise _differs(where, Point(frame, value), axis)
        for axis in sorted(variation.broken):
            raise _spoilt(f"{where} is not what its layout {layout} says", frame, value, axis)
        for axis in sorted(variation.pending - allowed.pending):
            origin = Blame().differs(Point(frame, value), axis)
            raise _at(
                f"{where} is still to be added up over {axis}, but its layout is {layout}, "
                f"because {origin.reason}: put {origin.remedy}",
                frame,
                value,
            )


def _differs(where: str, point: Point, axis: str) -> Error:
    origin = Blame().differs(point, axis)
    return _at(
        f"{where} may differ between the ranks of {axis}, but its layout says that it does not, "
        f"because {origin.reason}: put {origin.remedy}",
        point.frame,
        point.value,
    )


def _spoilt(what: str, frame: Frame, value: Value, axis: str) -> Error:
    return _at(f"{what}: {Blame().broken(Point(frame, value), axis)}", frame, value)


def _at(message: str, frame: Frame, value: Value) -> Error:
    """An Error at the operation that makes the value, or at the return."""
    producer = value.producer
    end = frame.function.last
    return Error(message, producer if producer is not None and producer.loc is not None else end)


def _check_collective(op: Collective, inputs: Inputs, point: Point, variations: Variations) -> None:
    """What is added up has to differ, and nothing in it may have been taken for complete before."""
    if not op.operands:
        return
    x, over = inputs[0], [axis for axis in op.axes if axis in variations.wide]
    kind: str | None = getattr(op, "op", None)
    if kind in ("sum", "prod") and not x.zero:
        for axis in over:
            if axis not in x.axes:
                raise _repeated(op, axis, variations.mesh.size(axis), point)
    if op.opname in _ROOT_DECIDES:
        return
    useless = x.broken if kind == "sum" else x.mixed
    for axis in over:
        if axis in x.pending and kind not in (None, "sum"):
            raise _not_a_sum(op, axis, point)
        if axis in useless:
            raise _useless(op, axis, point)


def _repeated(op: Collective, axis: str, ways: int, point: Point) -> Error:
    """The error about a reduction of a value that all ranks have."""
    x = _operand(point, lambda variation: axis not in variation.axes)
    result = f"{ways} times the value" if op.attributes["op"] == "sum" else f"its power of {ways}"
    return Error(
        f"{named(op)} reduces a value that is the same on all ranks of {axis} already, "
        f"{Blame().same(x, axis)}; that makes {result}: leave it out",
        point.value.producer,
    )


def _not_a_sum(op: Collective, axis: str, point: Point) -> Error:
    """The error about another reduction of the terms of a sum."""
    origin = Blame().differs(_operand(point, lambda variation: axis in variation.pending), axis)
    return Error(
        f"{named(op)} takes the {op.attributes['op']} of what is still to be added up over {axis}: "
        f"{origin.reason}; only op=sum completes it",
        point.value.producer,
    )


def _useless(op: Collective, axis: str, point: Point) -> Error:
    """The error about a collective behind an operation whose result no collective makes good."""
    x = _operand(point, lambda variation: axis in variation.broken)
    return Error(
        f"{named(op)} is given what is wrong already: {Blame().broken(x, axis)}",
        point.value.producer,
    )


def _operand(point: Point, holds: Callable[[Variation], bool]) -> Point:
    """The operand that a collective, or what it is fused with, has the trouble with."""
    frame, value, calls = point
    operands = value.producer.operands if value.producer is not None else ()
    chosen = [v for v in operands if holds(frame.variations[v])] or [*operands]
    return Point(frame, chosen[0], calls)
