"""Separates merged projections (QKV, gate and up) into one weight per segment.

A shard of a merged weight would hold elements of the first segment only.
"""

from __future__ import annotations

from dataclasses import dataclass

from irc.ir.core import Module, Op, Value, Weight
from irc.ops import Add, Linear, Matmul
from irc.pipeline import Stats
from irc.rewrite import erase_dead

from ..shared.edit import insert_before
from ..shared.parameters import Segment, Slicer, segments_of, slice_refusal, weights_of
from .place import planned_axes
from .plan import Row


@dataclass(frozen=True)
class Projection:
    """A linear, or a matmul with or without an addition, whose parameters have no other use.

    `parts` are the parameters, each with its dimension of output features.
    """

    result: Value
    source: Value
    parts: tuple[tuple[Value, int], ...]

    @property
    def weight(self) -> Weight:
        """The matrix, or its codes."""
        return (weights_of(self.parts[0][0]) or [])[0]

    @property
    def split(self) -> int:
        """The dimension of the matrix that has the features."""
        return self.parts[0][1]

    @staticmethod
    def of(value: Value) -> Projection | None:
        """The projection that makes a value, if there is one."""
        found = None
        match value.producer:
            case Linear() as op:
                found = _of_linear(op)
            case Matmul() as op:
                found = _of_matmul(op)
            case Add() as op:
                found = _of_add(op)
            case _:
                pass
        if found is None or not all(len(part.users) == 1 for part, _ in found.parts):
            return None
        return found


def _of_linear(op: Linear) -> Projection | None:
    if any(weights_of(value) is None for value in op.operands[1:]):
        return None
    return Projection(op.result, op.x, tuple((value, 0) for value in op.operands[1:]))


def _of_matmul(op: Matmul) -> Projection | None:
    if op.y.type.ndim != 2 or weights_of(op.y) is None:
        return None
    return Projection(op.result, op.x, ((op.y, 1),))


def _of_add(op: Add) -> Projection | None:
    for value, bias in ((op.x, op.y), (op.y, op.x)):
        product = value.producer
        if not isinstance(product, Matmul) or len(value.users) != 1:
            continue
        found = _of_matmul(product)
        if found is not None and isinstance(bias, Weight) and bias.type.ndim == 1:
            return Projection(op.result, product.x, (*found.parts, (bias, 0)))
    return None


def cut_segments(module: Module, rows: list[Row], stats: Stats) -> dict[str, str]:
    """Separate every merged projection that the plan shards and whose segments are used apart.

    Returns the names of the new weights, and the old weight of each.
    """
    slicer = Slicer(module)
    for function in module.functions.values():
        for op in list(function):
            projection = Projection.of(op.results[0]) if len(op.results) == 1 else None
            if op.parent is None or projection is None:
                continue
            name = projection.weight.name
            if not planned_axes(module, rows, name, projection.split):
                continue
            segments = segments_of(projection.result)
            if segments is None:
                continue
            ranges = [(begin, end) for _, begin, end in segments]
            refusals = (slice_refusal(part, ranges, dim) for part, dim in projection.parts)
            refusal = next(filter(None, refusals), None)
            if refusal is not None:
                stats.explain(f"the segments of @{name} stay together: {refusal}")
                continue
            _cut(projection, segments, slicer)
            stats.count("segments", len(segments))
            stats.explain(
                f"@{name} holds {len(segments)} segments; each is cut over the mesh by itself"
            )
    slicer.finish()
    return {part.name: merged.name for merged, parts in slicer.parts.items() for part in parts}


def _cut(merged: Projection, segments: list[Segment], slicer: Slicer) -> None:
    last = merged.result.producer
    assert last is not None
    for number, (value, begin, end) in enumerate(segments):
        cut = (begin, end)
        parts = [slicer.features(part, cut, number, last, dim) for part, dim in merged.parts]
        value.replace_by(_projected(last, merged.source, parts, value.name))
    for user in list(merged.result.users):
        user.erase()
    erase_dead(last)


def _projected(last: Op, source: Value, parts: list[Value], name: str | None) -> Value:
    """The projection of some of the features."""
    weight, bias = parts[0], parts[1] if len(parts) > 1 else None
    if isinstance(last, Linear):
        op: Op = insert_before(Linear(source, weight, bias=bias), last)
    else:
        op = insert_before(Matmul(source, weight), last)
        if bias is not None:
            op = insert_before(Add(op.result, bias), last)
    op.result.name = name
    return op.result
