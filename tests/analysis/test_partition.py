"""`balanced_cuts` against all partitions of short lists."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irc.analysis.partition import balanced_cuts

numbers = st.integers(0, 9)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool]]:
    count = draw(st.integers(1, 8))
    same = st.lists(numbers, min_size=count, max_size=count)
    allowed = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return draw(same), draw(same), allowed


def dearest(costs: list[int], cuts: list[int]) -> int:
    return max(sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)]))


def squares(costs: list[int], cuts: list[int]) -> int:
    return sum(sum(costs[a:b]) ** 2 for a, b in pairwise([0, *cuts, len(costs)]))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on busy machines
@given(rows(), st.integers(1, 5), st.sampled_from([0.0, 0.25, 1.0]))
def test_cuts_are_optimal(
    row: tuple[list[int], list[int], list[bool]], stages: int, slack: float
) -> None:
    costs, handed, allowed = row
    possible = [at for at in range(1, len(costs)) if allowed[at]]
    every = [list(cuts) for cuts in combinations(possible, stages - 1)]
    found = balanced_cuts(costs, handed, allowed, stages, slack)
    if not every:
        assert found is None
        return
    assert found in every
    limit = min(dearest(costs, cuts) for cuts in every) * (1 + slack)
    fitting = [cuts for cuts in every if dearest(costs, cuts) <= limit]
    assert found in fitting
    best = min((sum(handed[at] for at in c), squares(costs, c)) for c in fitting)
    assert (sum(handed[at] for at in found), squares(costs, found)) == best


@pytest.mark.parametrize(
    ("layers", "stages", "cuts"),
    [(7, 3, [(2, 4), (2, 5), (3, 5)]), (126, 8, None), (4, 4, [(1, 2, 3)])],
)
def test_equal_layers_are_spread_evenly(
    layers: int, stages: int, cuts: list[tuple[int, ...]] | None
) -> None:
    found = balanced_cuts([1.5] * layers, [7.0] * layers, [True] * layers, stages, 0.05)
    assert found is not None
    sizes = [b - a for a, b in pairwise([0, *found, layers])]
    assert max(sizes) - min(sizes) <= 1
    assert cuts is None or tuple(found) in cuts
