"""Which dimensions of a reshape belong together, and which splits pass through it."""

from __future__ import annotations

import pytest

from irc.core import Value
from irc.dims import Shape, symbol
from irc.errors import Error
from irc.ops import Reshape
from irc.ops.factors import Group, factor_groups, reshape_rule
from irc.types import TensorType

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


def test_only_the_first_of_a_group_may_be_split() -> None:
    assert reshape_rule((2, 3, 4), (6, 4)) == "g0 x1! g1 -> g0 g1"
    assert reshape_rule((1, 6), (2, 1, 3)) == "x0! g0 -> g0 1 1"


def test_heads_keep_their_split() -> None:
    x = Value(TensorType("f32", (B, S, 64), ((), (), ("tp",))), None, 0)
    apart = Reshape(x, shape=(B, S, 8, 8)).result
    assert str(apart.type) == "f32[B, S, 8@tp, 8]"
    assert str(Reshape(apart, shape=(B, S, 64)).result.type) == "f32[B, S, 64@tp]"


def test_a_split_between_two_merged_dimensions_is_refused() -> None:
    x = Value(TensorType("f32", (B, 8, 8), ((), (), ("tp",))), None, 0)
    with pytest.raises(Error, match="reshape needs dimension 'x2' whole"):
        Reshape(x, shape=(B, 64))


def test_parts_that_hold_no_whole_heads_are_refused_on_one_rank() -> None:
    """3 heads over 2 ranks: 12 of 24 features are not the 2 heads that the first rank would get."""
    one_rank = Value(TensorType("f32", (5, 12)), None, 0)
    with pytest.raises(Error, match=r"reshape: \[5, 12\] has 60 elements"):
        Reshape(one_rank, shape=(5, 2, 8))
