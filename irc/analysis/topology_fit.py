"""Alpha and beta of collectives from measured times, by least squares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from ..errors import Error
from .topology import Line, Lines, Measured, traffic

MOST_LINES = 3  # a library such as NCCL has three protocols
WORTH = 0.7  # one more line must reduce the error to this fraction
_FASTEST = 1e6  # GB/s, where more bytes take no longer


@dataclass(frozen=True)
class Measurement:
    """One collective of `group_size` ranks: `size` bytes (as in `topology.sent`) took `us`."""

    kind: str
    group_size: int
    size: int
    us: float


def fit(measurements: Iterable[Measurement], most_lines: int = MOST_LINES) -> Measured:
    """The lines of every kind and group size that was measured.

    They minimize the squares of the relative errors, so that a small message counts as much as a
    large one.
    """
    groups: dict[str, dict[int, list[Measurement]]] = {}
    for measurement in measurements:
        if not measurement.us > 0:
            raise Error(
                f"{measurement.kind} of {measurement.size} bytes took {measurement.us} us; "
                "expected a positive time"
            )
        groups.setdefault(measurement.kind, {}).setdefault(measurement.group_size, []).append(
            measurement
        )
    return {
        kind: {
            group_size: _fitted(of_size, most_lines)
            for group_size, of_size in sorted(by_group_size.items())
        }
        for kind, by_group_size in groups.items()
    }


def worst_error(measurements: Sequence[Measurement], lines: Lines) -> float:
    """The largest |model - measured| / measured."""
    return max(abs(_predicted(lines, m) / m.us - 1) for m in measurements)


def _predicted(lines: Lines, m: Measurement) -> float:
    return min(line.time(traffic(m.kind, m.group_size, m.size)) for line in lines)


def _fitted(measurements: list[Measurement], most_lines: int) -> Lines:
    measurements = sorted(measurements, key=lambda m: m.size)
    best: Lines = (_line(measurements),)
    error = _error(measurements, best)
    for count in range(2, min(most_lines, len(measurements) // 2) + 1):
        for cut in _cuts(len(measurements), count):
            lines = tuple(_line(measurements[a:b]) for a, b in cut)
            candidate = _error(measurements, lines)
            if candidate < error * (WORTH if len(best) < count else 1):
                best, error = lines, candidate
    return best


def _cuts(points: int, parts: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut a row of points into parts of two at least."""
    for inner in combinations(range(2, points - 1), parts - 1):
        ends = [0, *inner, points]
        pairs = list(pairwise(ends))
        if all(b - a >= 2 for a, b in pairs):
            yield pairs


def _error(measurements: Sequence[Measurement], lines: Lines) -> float:
    return sum((_predicted(lines, m) / m.us - 1) ** 2 for m in measurements)


def _line(measurements: Sequence[Measurement]) -> Line:
    """The best line through some points; neither constant is negative."""
    times = np.array([m.us for m in measurements])
    moved = np.array([traffic(m.kind, m.group_size, m.size) for m in measurements])
    rows = np.stack([1 / times, moved / times], axis=1)
    ones = np.ones(len(measurements))
    scale = max(float(moved.max()), 1.0)
    solved: list[float] = np.linalg.lstsq(rows * [1.0, 1 / scale], ones, rcond=None)[0].tolist()
    alpha, slope = solved[0], solved[1] / scale
    if slope <= 0:
        alpha, slope = _share(rows[:, 0], ones), 0.0
    elif alpha < 0:
        alpha, slope = 0.0, _share(rows[:, 1], ones)
    rate = min(_FASTEST, 1e-3 / slope) if slope > 0 else _FASTEST
    return Line(round(alpha, 2), round(rate, 3))


def _share(column: np.ndarray, ones: np.ndarray) -> float:
    """The factor that brings one column nearest to ones."""
    return float(column @ ones) / float(column @ column)
