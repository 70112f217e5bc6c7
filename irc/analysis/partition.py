"""Divides a row of groups into consecutive stages of about equal cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_ROUNDS = 60  # halvings of the interval of the best balance
_ROUNDING = 1 + 1e-9  # relative error of sums of costs
_EVEN = 1e-6  # weight of evenness, where one transfer of the largest size is 1


def balanced_cuts(
    costs: Sequence[float],
    handed: Sequence[float],
    allowed: Sequence[bool],
    stages: int,
    slack: float = 0.0,
) -> list[int] | None:
    """The groups at which the stages after the first begin, or None where that is impossible.

    Dividing before group `i` transfers `handed[i]` bytes and is possible where `allowed[i]`; entry
    0 of both is not read. Of all partitions whose most expensive stage costs at most `1 + slack`
    times the least possible, the one that transfers the fewest bytes is taken; of several, the most
    even one, by the sum of squares.
    """
    starts = [0, *(i for i in range(1, len(costs)) if allowed[i])]
    if len(starts) < stages:
        return None
    before = np.array([0.0, *accumulate(map(float, costs))])
    sums = before[[*starts, len(costs)]]
    limit = _least_bottleneck(sums.tolist(), stages) * (1 + slack) * _ROUNDING
    largest = max((handed[i] for i in starts[1:]), default=0) or 1
    prices = np.array([0.0, *(handed[i] / largest for i in starts[1:])])
    return [starts[at] for at in _cheapest(sums, prices, stages, limit)]


def _least_bottleneck(sums: list[float], stages: int) -> float:
    """The least cost of the most expensive stage; `sums` are the costs before each start."""
    low, high = max(b - a for a, b in pairwise(sums)), sums[-1]
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if _stages_needed(sums, middle) <= stages:
            high = middle
        else:
            low = middle
    return high


def _stages_needed(sums: list[float], limit: float) -> int:
    """The number of stages if each is as large as fits; one group always fits."""
    count = at = 0
    while at < len(sums) - 1:
        at = max(at + 1, bisect_right(sums, sums[at] + limit) - 1)
        count += 1
    return count


def _cheapest(sums: Numbers, prices: Numbers, stages: int, limit: float) -> list[int]:
    """The starts of the stages after the first: a shortest path, one step per stage."""
    count = len(prices)
    best = np.full(count + 1, np.inf)  # the price of the stages that end before each start
    best[0] = 0.0
    origins: list[list[int]] = []
    for _ in range(stages):
        reached = np.full(count + 1, np.inf)
        origin = [0] * (count + 1)
        for end in range(1, count + 1):
            sizes: Numbers = (sums[end] - sums[:end]) / (limit or 1.0)
            path = best[:end] + prices[:end] + _EVEN * sizes * sizes
            path[sizes > 1] = np.inf
            at = int(np.argmin(path))
            reached[end], origin[end] = path[at], at
        best = reached
        origins.append(origin)
    cuts: list[int] = []
    at = count
    for origin in reversed(origins):
        at = origin[at]
        cuts.append(at)
    return cuts[-2::-1]
