"""`write_trace`: expected and measured steps over time, in the Trace Event Format of Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .timing import PhaseTimes

_LANES = ("phases", "expected", "measured")


def write_trace(path: Path, phases: Sequence[PhaseTimes]) -> None:
    """Write a process per rank with a thread of expected and one of measured steps; a run of each
    phase, one phase behind the other.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    entries: list[dict[str, Any]] = []
    start = 0.0
    for times in phases:
        steps = [*_slices(times)]
        length = max((entry["ts"] + entry["dur"] for entry in steps), default=0.0)
        steps.insert(0, _slice(0, "phases", times.phase.name, 0.0, length))
        entries += [entry | {"ts": entry["ts"] + start} for entry in steps]
        start += 1.05 * length
    for rank in sorted({entry["pid"] for entry in entries}):
        named = [("process_name", 0, f"rank {rank}")]
        named += [("thread_name", lane, name) for lane, name in enumerate(_LANES)]
        entries += [
            {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
            for kind, lane, name in named
        ]
    document = {"traceEvents": entries, "displayTimeUnit": "ns"}
    path.write_text(json.dumps(document), encoding="utf-8")


def _slices(times: PhaseTimes) -> Iterator[dict[str, Any]]:
    """Expected steps one behind the other, those of a stage behind those of the stage before; and
    measured ones."""
    at = 0.0
    for step in times.steps:
        facts = {"scope": step.scope, "values": " ".join(step.values), "bytes": step.nbytes}
        for rank in times.ranks[step.rank]:
            yield _slice(rank, "expected", step.name, at, step.us, **facts)
        at += step.us
    for event, scope, operation in times.last:
        at = (event.begin - times.phase.windows[-1][0]) / 1e3
        facts = {"scope": scope, "values": event.value, "kernel": event.kernel}
        yield _slice(event.rank, "measured", operation, at, event.us, **facts)


def _slice(rank: int, lane: str, name: str, at: float, us: float, **facts: Any) -> dict[str, Any]:
    place = {"ph": "X", "pid": rank, "tid": _LANES.index(lane)}
    return {"name": name, **place, "ts": max(at, 0.0), "dur": us, "args": facts}
