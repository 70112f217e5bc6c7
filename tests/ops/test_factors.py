"""Groups of dimensions of a reshape, and the shardings that pass through it."""

from __future__ import annotations

import pytest

from irc.ir.dims import Shape, symbol
from irc.ops.factors import Group, factor_groups, reshape_rule

B, S, H = symbol("B"), symbol("S"), symbol("H")


@pytest.mark.parametrize(
    ("old", "new", "groups"),
    [
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((6, 4), (2, 3, 4), [([0], [0, 1]), ([1], [2])]),
        ((4, 6), (8, 3), [([0, 1], [0, 1])]),
        ((6, 4, 5), (4, 6, 5), [([0, 1], [0, 1]), ([2], [2])]),
        ((2, 1, 3), (1, 2, 3, 1), [([0], [1]), ([2], [2])]),
        ((B, S, 64), (B * S, 64), [([0, 1], [0]), ([2], [1])]),
        ((B * S, 8, 8), (B, S, 64), [([0], [0, 1]), ([1, 2], [2])]),
        ((B, 2 * S), (2 * B, S), [([0, 1], [0, 1])]),
        ((B, H * 4, S), (B, H, 4, S), [([0], [0]), ([1], [1, 2]), ([2], [3])]),
        ((B + 1, S), (S * (B + 1),), [([0, 1], [0])]),
        ((0, 3), (3, 0), []),
        ((1, 1), (), []),
    ],
)
def test_groups(old: Shape, new: Shape, groups: list[Group]) -> None:
    assert factor_groups(old, new) == groups


def test_only_the_first_of_a_group_may_be_sharded() -> None:
    assert reshape_rule((2, 3, 4), (6, 4)) == "g0 x1! g1 -> g0 g1"
    assert reshape_rule((1, 6), (2, 1, 3)) == "x0! g0 -> g0 1 1"
