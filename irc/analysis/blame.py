"""Explains why a value differs between ranks, or does not, by the operation to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from ..ir.core import Function, Op, Weight
from ..ops.control import Call
from .frames import Point
from .fused import collectives, communicates
from .places import named, value_name
from .transfer import numbers
from .variation import Variation

Order: TypeAlias = tuple[int, ...]  # positions of the calls that lead to an operation, then its own
Holds: TypeAlias = Callable[[Variation], bool]


class Origin(NamedTuple):
    """The cause of a difference: a clause about it, and the collective to insert."""

    reason: str
    remedy: str


class Blame:
    """Walks back from a value through the frames of a dataflow. Slow, so for errors only."""

    def __init__(self) -> None:
        self._positions: dict[Function, dict[Op, int]] = {}

    def differs(self, point: Point, axis: str) -> Origin:
        """The cause of the difference of a value over `axis`.

        The first contraction on the way whose sum over the axis was never completed; else the first
        operation that uses a weight or an argument sharded over it; else the first that differs.
        """
        found = [
            (kind, self._order(each), each)
            for each in _behind(point, lambda variation: axis in variation.axes)
            if (kind := _kind(each, axis)) is not None
        ]
        if not found:
            what = value_name(_resolved(point).value)
            return Origin(
                f"{what} is sharded over {axis}", f"an all_gather over {axis} behind {what}"
            )
        _, _, culprit = min(found, key=lambda row: row[:2])
        op = _producer(culprit)
        return Origin(f"{named(op)} {_reason(culprit, axis)}", _remedy(culprit, axis))

    def broken(self, point: Point, axis: str) -> str:
        """A clause: the operation that used a partial sum as complete, and its origin."""
        spoilt = [
            (self._order(each), each)
            for each in _behind(point, lambda variation: axis in variation.broken)
            if not _any_operand(each, lambda variation: axis in variation.broken)
        ]
        if not spoilt:  # inside an operation that is fused with the collective
            return f"before it, terms of a sum over {axis} are taken for complete"
        _, first = min(spoilt, key=lambda pair: pair[0])
        op = _producer(first)
        operands = _operands(first)
        numbered = numbers(op, [_variation(p) for p in operands])
        for operand, by_number in zip(operands, numbered, strict=True):
            if axis in by_number:
                return (
                    f"{named(op)} takes for the same on all ranks of {axis} what "
                    f"{named(self._rank(operand, axis))} makes another on each of them"
                )
        terms = [p for p in operands if axis in _variation(p).partial]
        if not terms:
            return (
                f"{named(op)} adds its {' and '.join(op.addends or ['operands'])} once per rank of "
                f"{axis}; add it behind the all_reduce instead"
            )
        origin = self.differs(terms[0], axis)
        return (
            f"{named(op)} takes as complete the partial sum over {axis}: "
            f"{origin.reason}; put {origin.remedy}"
        )

    def _rank(self, point: Point, axis: str) -> Op:
        """The first `rank` in the computation of the value."""
        behind = _behind(point, lambda variation: axis in variation.numbered)
        found = [(self._order(each), _producer(each)) for each in behind]
        return min((pair for pair in found if not pair[1].operands), key=lambda pair: pair[0])[1]

    def same(self, point: Point, axis: str) -> str:
        """A clause: why the value is the same on all ranks of `axis`."""
        found = [
            (self._order(each), _producer(each))
            for each in _behind(point, lambda variation: axis not in variation.axes)
            if _made_alike(each, axis)
        ]
        if found:
            _, op = max(found, key=lambda pair: pair[0])
            return f"since {named(op)}"
        producer = point.value.producer
        if producer is None:
            return f"because nothing splits {value_name(point.value)} over it"
        return f"because {named(producer)} uses nothing that differs over it"

    def _order(self, point: Point) -> Order:
        ops = [*(op for _, op in point.calls), _producer(point)]
        return tuple(self._position(op) for op in ops)

    def _position(self, op: Op) -> int:
        function = op.parent
        if function is None:
            raise ValueError(f"{op.opname} is in no function")
        known = self._positions.get(function)
        if known is None:
            known = self._positions[function] = {each: i for i, each in enumerate(function)}
        return known[op]


def _behind(start: Point, holds: Holds) -> Iterator[Point]:
    """The points behind one that satisfy `holds`, itself included, and are results of operations.

    A call stands for its results. The search stops at a point that fails.
    """
    waiting, seen = [start], set[Point]()
    while waiting:
        point = _resolved(waiting.pop())
        if point in seen or not holds(_variation(point)):
            continue
        seen.add(point)
        if point.value.producer is not None:
            yield point
            waiting += _operands(point)


def _resolved(point: Point) -> Point:
    """The same value where it was computed: inside the callee, or in the caller."""
    while True:
        frame, value, calls = point
        op = value.producer
        if isinstance(op, Call):
            inner = frame.calls[op]
            point = Point(inner, op.callee.returned[value.index], (*calls, (frame, op)))
        elif isinstance(value.owner, Function) and calls:
            outer, call = calls[-1]
            point = Point(outer, call.operands[value.index], calls[:-1])
        else:
            return point


def _operands(point: Point) -> list[Point]:
    frame, _, calls = point
    return [_resolved(Point(frame, value, calls)) for value in _producer(point).operands]


def _any_operand(point: Point, holds: Holds) -> bool:
    return any(holds(_variation(operand)) for operand in _operands(point))


def _variation(point: Point) -> Variation:
    return point.frame.variations[point.value]


def _producer(point: Point) -> Op:
    op = point.value.producer
    if op is None:
        raise ValueError(f"{point.value!r} was made by no operation")
    return op


def _kind(point: Point, axis: str) -> int | None:
    """How relevant an operation is to the message, 0 first; None for not at all."""
    operands = _operands(point)
    varying = [p for p in operands if axis in _variation(p).axes]
    op = _producer(point)
    if communicates(op) or not op.operands:
        return 2 if not varying else None
    if axis in _variation(point).partial and all(
        axis not in _variation(p).partial for p in varying
    ):
        return 0
    if any(p.value.producer is None for p in varying):
        return 1
    return None


def _reason(point: Point, axis: str) -> str:
    op = _producer(point)
    given = [p for p in _operands(point) if p.value.producer is None and axis in _variation(p).axes]
    for operand in sorted(given, key=lambda p: not isinstance(p.value, Weight)):
        return f"uses {value_name(operand.value)}, which is sharded over {axis}"
    if not op.operands:
        return f"differs on every rank of {axis}"
    if communicates(op):
        return f"leaves something else on every rank of {axis}"
    return f"sums over a dimension that is sharded over {axis}"


def _remedy(point: Point, axis: str) -> str:
    variation = _variation(point)
    if axis in variation.partial:
        return f"an all_reduce over {axis} behind it"
    if any(axis in axes for axes in variation.split):
        return f"an all_gather over {axis} behind it"
    return f"an all_reduce or all_gather over {axis} behind it"


def _made_alike(point: Point, axis: str) -> bool:
    op = _producer(point)
    varied = _any_operand(point, lambda variation: axis in variation.axes)
    return varied and communicates(op) and any(axis in part.axes for part in collectives(op))
