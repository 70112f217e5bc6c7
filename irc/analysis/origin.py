"""Explains why a value differs between ranks, by the operation where that begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import Error
from ..ir.core import Op, Value, Weight
from .fused import communicates
from .layout import Layout
from .places import named, value_name


def wrong_operation(error: Error, op: Op, layouts: Mapping[Value, Layout]) -> Error:
    """The error about an operation on layouts that it does not take, with where they are from."""
    reason = error.message
    own = reason[3:] if reason.startswith("it ") else f"has a wrong operand: {reason}"
    message = f"{named(op)} {own}"
    clauses: list[str] = []
    for value in op.operands:
        layout = layouts[value]
        axes = layout.partial or layout.numbered
        if axes:
            clauses.append(origin(value, sorted(axes)[0], layouts))
    return Error("; ".join([message, *dict.fromkeys(clauses)]), op)


def origin(value: Value, axis: str, layouts: Mapping[Value, Layout]) -> str:
    """A clause: the cause of the difference of a value over an axis, and the remedy.

    The cause is the first operation whose result is a partial sum over the axis; else the first
    that uses a weight or an argument sharded over it; else the first that differs.
    """

    def differing(op: Op) -> list[Value]:
        return [each for each in op.operands if axis in layouts[each].axes]

    waiting, seen = [value], dict[Op, None]()  # later ones first
    while waiting:
        op = waiting.pop().producer
        if op is not None and op not in seen:
            seen[op] = None
            waiting += differing(op)
    behind = list(seen)
    sums = [
        op
        for op in behind
        if axis in layouts[op.results[0]].partial and not communicates(op)
        if not any(axis in layouts[each].partial for each in op.operands)
    ]
    users = [op for op in behind if any(each.producer is None for each in differing(op))]
    causes = sums or users or [op for op in behind if not differing(op)]
    if not causes:
        what = value_name(value)
        return f"{what} is sharded over {axis}: put an all_gather over {axis} behind {what}"
    op = causes[-1]
    layout = layouts[op.results[0]]
    known = "all_reduce" if axis in layout.partial else "all_gather"
    remedy = known if axis in layout.partial | layout.placed else "all_reduce or all_gather"
    return f"{named(op)} {_reason(op, axis, differing(op))}: put an {remedy} over {axis} behind it"


def _reason(op: Op, axis: str, differing: Sequence[Value]) -> str:
    given = [value for value in differing if value.producer is None]
    if given:
        value = next((each for each in given if isinstance(each, Weight)), given[0])
        return f"uses {value_name(value)}, which is sharded over {axis}"
    if not op.operands:
        return f"differs on every rank of {axis}"
    if communicates(op):
        return f"leaves something else on every rank of {axis}"
    return f"sums over a dimension that is sharded over {axis}"
