"""Segments of merged features: the ranges that splits and slices take apart."""

from __future__ import annotations

from itertools import pairwise

from irc.ir.core import Op, Value

Segment = tuple[Value, int, int]  # what has it, its first feature, the end


def segments_of(merged: Value) -> list[Segment] | None:
    """The segments of the features of a value, if its uses take them apart."""
    last = merged.type.ndim - 1
    found: list[Segment] = []
    for user in merged.users:
        if user.opname not in ("split", "slice") or user.attributes["dim"] % (last + 1) != last:
            return None
        parts = _of_split(user) if user.opname == "split" else _of_slice(user)
        if parts is None:
            return None
        found += parts
    found.sort(key=lambda segment: segment[1])
    apart = all(a[2] <= b[1] for a, b in pairwise(found))
    return found if apart and len(found) > 1 else None


def _of_split(op: Op) -> list[Segment] | None:
    found: list[Segment] = []
    at = 0
    for value, size in zip(op.results, op.attributes["sizes"], strict=True):
        if not isinstance(size, int):
            return None
        found.append((value, at, at + size))
        at += size
    return found


def _of_slice(op: Op) -> list[Segment] | None:
    start, stop, step = (op.attributes[name] for name in ("start", "stop", "step"))
    if not isinstance(start, int) or not isinstance(stop, int) or step != 1:
        return None
    return [(op.result, start, stop)]
