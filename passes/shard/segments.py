"""Separates merged projections (QKV, gate and up) into one weight per segment.

A shard of a merged weight would hold elements of the first segment only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from irc.ir.core import Value, Weight
from irc.ops import Add, Linear, Matmul

from ..shared.parameters import Segment, Slicer, segments_of, slice_refusal, weights_of

if TYPE_CHECKING:
    from .plan import Plan


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
        projection = None
        match value.producer:
            case Linear() as op:
                projection = _of_linear(op)
            case Matmul() as op:
                projection = _of_matmul(op)
            case Add() as op:
                projection = _of_add(op)
            case _:
                pass
        if projection is None or not all(len(part.users) == 1 for part, _ in projection.parts):
            return None
        return projection


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
        unbiased = _of_matmul(product)
        if unbiased is not None and isinstance(bias, Weight) and bias.type.ndim == 1:
            return Projection(op.result, product.x, (*unbiased.parts, (bias, 0)))
    return None


def cut_refusal(projection: Projection, segments: list[Segment], ranks: int) -> str | None:
    """Why a projection is not separated into segments, for shards over so many ranks."""
    ranges = [(begin, end) for _, begin, end in segments]
    if any(end - begin < ranks for begin, end in ranges):
        return f"one has less than a feature for each of {ranks} ranks"
    refusals = (slice_refusal(part, ranges, dim) for part, dim in projection.parts)
    return next(filter(None, refusals), None)


def cut_segments(plan: Plan) -> None:
    """Separate every merged projection that the plan shards and whose segments are used apart.

    The plan gets the names of the new weights, and the old weight of each.
    """
    slicer, stats = Slicer(plan.module), plan.stats
    for function in plan.module.functions.values():
        for op in list(function):
            projection = Projection.of(op.results[0]) if len(op.results) == 1 else None
            if op.parent is None or projection is None:
                continue
            name = projection.weight.name
            group_size = plan.group_size(name, projection.split)
            segments = segments_of(projection.result)
            if group_size == 1 or segments is None:
                continue
            refusal = cut_refusal(projection, segments, group_size)
            if refusal is not None:
                stats.explain(f"the segments of @{name} stay together: {refusal}")
                continue
            slicer.separate(projection.result, projection.source, projection.parts, segments)
            stats.count("segments", len(segments))
            stats.explain(
                f"@{name} holds {len(segments)} segments; each is cut over the mesh by itself"
            )
    slicer.finish()
    plan.origins |= {p.name: merged.name for merged, parts in slicer.parts.items() for p in parts}
