"""The sharding rule of reshape: which dimensions of two shapes hold the same elements."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Error
from ..ir.dims import Dim, DimLike, Shape, exact_divide
from .shapes import rule_text, shape_text

Group = tuple[list[int], list[int]]  # positions in the old and in the new shape


def reshape_rule(old: Shape, new: Shape) -> str:
    """The rule for a reshape between two shapes of one element count.

    Dimensions are cut into the smallest groups of equal element count. In a group the first
    dimension of either side varies slowest, so that sharding it divides both sides at the
    same element, if the shards are even (`local_attributes` in passes checks the counts).
    """
    if _product(old, range(len(old))) != _product(new, range(len(new))):
        raise Error(f"reshape: {shape_text(old)} and {shape_text(new)} hold other elements")
    left, right = [f"x{i}!" for i in range(len(old))], ["1"] * len(new)
    for number, (olds, news) in enumerate(factor_groups(old, new)):
        if olds and news:
            left[olds[0]] = right[news[0]] = f"g{number}"
    return rule_text([left], [right])


def factor_groups(old: Shape, new: Shape) -> list[Group]:
    """Positions of both shapes in groups of equal products; dimensions of size 1 are left out."""
    olds, news = ([i for i, size in enumerate(s) if size != 1] for s in (old, new))
    if 0 in old or 0 in new:
        return []
    groups: list[Group] = []
    i = j = 0
    while i < len(olds) or j < len(news):
        i_end, j_end = i + 1, j + 1
        a, b = _product(old, olds[i:i_end]), _product(new, news[j:j_end])
        while a != b:
            more_old, more_new = _behind(a, b), _behind(b, a)
            if more_old or not more_new:
                i_end += 1
            if more_new or not more_old:
                j_end += 1
            if i_end > len(olds) and j_end > len(news):
                break
            a, b = _product(old, olds[i:i_end]), _product(new, news[j:j_end])
        groups.append((olds[i:i_end], news[j:j_end]))
        i, j = i_end, j_end
    return groups


def _behind(a: DimLike, b: DimLike) -> bool:
    """Whether the product `a` is known to be the smaller part of `b`."""
    if not isinstance(a, Dim) and not isinstance(b, Dim):
        return a < b
    return exact_divide(b, a) is not None


def _product(shape: Shape, places: Sequence[int]) -> DimLike:
    total: DimLike = 1
    for place in places:
        total = total * shape[place]
    return total
