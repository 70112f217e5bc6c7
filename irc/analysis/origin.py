"""Explains why a value differs between ranks, by the operation where that begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..errors import Error
from ..ir.core import Op, Value, Weight
from ..ops import Call
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
    found = [(_kind(op, axis, layouts), op) for op in _behind(value, axis, layouts)]
    known = [(kind, op) for kind, op in found if kind is not None]
    if not known:
        what = value_name(value)
        return f"{what} is sharded over {axis}: put an all_gather over {axis} behind {what}"
    least = min(kind for kind, _ in known)
    op = [op for kind, op in known if kind == least][-1]
    return f"{named(op)} {_reason(op, axis, layouts)}: put {_remedy(op, axis, layouts)} behind it"


def _behind(value: Value, axis: str, layouts: Mapping[Value, Layout]) -> Iterator[Op]:
    """The operations behind a value whose results differ over an axis, later ones first."""
    waiting, seen = [value], set[Op]()
    while waiting:
        op = waiting.pop().producer
        if op is None or op in seen:
            continue
        seen.add(op)
        if any(axis in layouts[result].axes for result in op.results):
            yield op
            waiting += [v for v in op.operands if axis in layouts[v].axes]


def _kind(op: Op, axis: str, layouts: Mapping[Value, Layout]) -> int | None:
    """How relevant an operation is to the message, 0 first; None for not at all."""
    differing = _differing(op, axis, layouts)
    if communicates(op) or not op.operands:
        return None if differing else 2
    if axis in layouts[op.results[0]].partial and not any(
        axis in layouts[v].partial for v in differing
    ):
        return 0
    return 1 if any(v.producer is None for v in differing) else None


def _differing(op: Op, axis: str, layouts: Mapping[Value, Layout]) -> Sequence[Value]:
    return [value for value in op.operands if axis in layouts[value].axes]


def _reason(op: Op, axis: str, layouts: Mapping[Value, Layout]) -> str:
    if isinstance(op, Call):
        return f"returns another value on every rank of {axis}"
    given = [v for v in _differing(op, axis, layouts) if v.producer is None]
    for value in sorted(given, key=lambda value: not isinstance(value, Weight)):
        return f"uses {value_name(value)}, which is sharded over {axis}"
    if not op.operands:
        return f"differs on every rank of {axis}"
    if communicates(op):
        return f"leaves something else on every rank of {axis}"
    return f"sums over a dimension that is sharded over {axis}"


def _remedy(op: Op, axis: str, layouts: Mapping[Value, Layout]) -> str:
    layout = layouts[op.results[0]]
    if axis in layout.partial:
        return f"an all_reduce over {axis}"
    return f"an all_gather over {axis}" if axis in layout.placed else "an all_reduce or all_gather"
