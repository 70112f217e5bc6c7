"""Placement of buffers in one arena: those that are alive at the same time do not overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .core import ALIGNMENT


@dataclass(frozen=True)
class Lifetime:
    """The steps from the first that writes a buffer to the last that uses it, and its bytes."""

    first: int
    last: int
    nbytes: int


def aligned(nbytes: int) -> int:
    """Bytes up to the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(lifetimes: Mapping[str, Lifetime]) -> dict[str, int]:
    """The offset of every buffer: the largest first, each as low as it fits."""
    offsets: dict[str, int] = {}
    alive: dict[int, list[str]] = {}  # placed buffers by step
    for name, life in sorted(lifetimes.items(), key=lambda item: (-item[1].nbytes, item[1].first)):
        steps = range(life.first, life.last + 1)
        beside = {other for step in steps for other in alive.get(step, ())}
        taken = sorted((offsets[other], lifetimes[other].nbytes) for other in beside)
        offset = 0
        for start, size in taken:
            if offset + life.nbytes <= start:
                break
            offset = max(offset, aligned(start + size))
        offsets[name] = offset
        for step in steps:
            alive.setdefault(step, []).append(name)
    return offsets
