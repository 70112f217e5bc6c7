"""Separates a linear of gate and up together, as checkpoints merge them, into two."""

from __future__ import annotations

from dataclasses import dataclass

from irc.ir.core import Module, Value
from irc.ops import Linear, Mul
from irc.pipeline import Stats
from irc.rewrite import permit, report_failure

from ..shared.edit import used_once
from ..shared.parameters import Segment, Slicer, segments_of, slice_refusal


@dataclass(frozen=True)
class Merged:
    """A linear whose two halves are gate and up."""

    linear: Linear
    halves: list[Segment]


def separate_merged(module: Module, name: str, acts: frozenset[str], stats: Stats) -> None:
    """Give act(a) * b two linears, where a and b are the halves of the result of one."""
    slicer = Slicer(module)
    for function in module.functions.values():
        for op in list(function):
            merged = _merged(op, acts) if isinstance(op, Mul) and op.parent is not None else None
            if isinstance(merged, str):
                report_failure(name, op, merged)
            elif merged is not None and permit(name, op):
                x, *parameters = merged.linear.operands
                parts = [(parameter, 0) for parameter in parameters]
                slicer.separate(merged.linear.result, x, parts, merged.halves)
                stats.count("merged projections")
    slicer.finish()


def _merged(product: Mul, acts: frozenset[str]) -> Merged | str | None:
    """The merged linear before a product; or why it stays; None where there is none."""
    for active, up in (product.operands, product.operands[::-1]):
        op = active.producer
        if op is None or op.opname not in acts:
            continue
        gate = op.operands[0]
        merged = _whole(gate)
        if merged is None or merged is not _whole(up) or not isinstance(merged.producer, Linear):
            continue
        halves = segments_of(merged)
        if halves is None or {value for value, _, _ in halves} != {gate, up}:
            return "the result of the linear is not divided into gate and up"
        if not all(used_once(value) for value in (active, gate, up)):
            return "gate or up has other uses"
        cuts = [(begin, end) for _, begin, end in halves]
        parameters = merged.producer.operands[1:]
        refusals = [slice_refusal(parameter, cuts) for parameter in parameters]
        return next(filter(None, refusals), None) or Merged(merged.producer, halves)
    return None


def _whole(value: Value) -> Value | None:
    """The value of which a split or a slice takes this one."""
    op = value.producer
    return op.operands[0] if op is not None and op.opname in ("split", "slice") else None
