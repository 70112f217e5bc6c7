"""The layout of a reshaped value: the same factors of the mesh and of local sizes, regrouped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..errors import Error
from ..ir.dims import Dim, DimLike, Shape, exact_divide
from .layout import WHOLE, Layout, Place, is_simple

Factor: TypeAlias = tuple[DimLike, Place]  # a local size, and the axes that shard it

MIXED = "its result mixes elements of several shards"


def reshaped(shape: Shape, dims: Sequence[Place], new: Shape) -> tuple[Place, ...]:
    """The places of the dimensions of `new`, which has the elements of `shape` in their order."""
    if not any(dims):
        return (WHOLE,) * len(new)
    waiting = [f for n, place in zip(shape, dims, strict=True) for f in _factors(n, place)][::-1]
    groups = [_taken(new, at, waiting) for at in range(len(new))]
    for size, place in reversed(waiting):
        if size != 1 or (place and not groups):
            raise Error(MIXED)
        if place:
            groups[-1].append((size, place))
    return tuple([_place(group) for group in groups])


def _factors(size: DimLike, place: Place) -> list[Factor]:
    """A dimension of 12 with the place (4, "tp") is 4, and 3 over tp."""
    found: list[Factor] = []
    axes: Place = ()
    rest: DimLike | None = size
    for entry in place if is_simple(place) else ():
        if isinstance(entry, str):
            axes += (entry,)
        elif isinstance(entry, (int, Dim)) and rest is not None:
            rest = exact_divide(rest, entry)
            found.append((entry, axes))
            axes = WHOLE
    return [(size, place)] if rest is None or not is_simple(place) else [*found, (rest, axes)]


def _taken(new: Shape, at: int, waiting: list[Factor]) -> list[Factor]:
    """The factors of dimension `at` of the new shape, taken from those that wait."""
    taken: list[Factor] = []
    left = new[at]
    if left == 1:
        size, place = waiting[-1] if waiting else (1, WHOLE)
        if size == 1:
            return [waiting.pop()] if waiting else []
        if place and is_simple(place) and at + 1 < len(new) and new[at + 1] == size:
            waiting[-1] = (size, WHOLE)
            return [(1, place)]
    while left != 1:
        if not waiting:
            raise Error(MIXED)
        size, place = waiting.pop()
        rest = exact_divide(left, size)
        if rest is None:  # the outer part of a factor keeps its axes
            inner = exact_divide(size, left)
            if not is_simple(place) or (inner is None and (not waiting or waiting[-1][1])):
                raise Error(MIXED)
            if inner is None:
                waiting.append((size * waiting.pop()[0], place))
                continue
            waiting.append((inner, WHOLE))
            size, rest = left, 1
        taken.append((size, place))
        left = rest
    return taken


def _place(factors: Sequence[Factor]) -> Place:
    """The place of consecutive factors, in the shortest form."""
    place: Place = ()
    before: DimLike = 1  # the product of the local sizes behind the last axes
    for size, inner in factors:
        if inner and not is_simple(inner):
            if place or before != 1:
                raise Error(MIXED)
            return inner
        if inner and before != 1:
            place += (before,)
            before = 1
        place += inner
        before = before * size
    return place if any(isinstance(entry, str) for entry in place) else WHOLE


def moved_axes(layout: Layout, shape: Shape) -> Iterator[Layout]:
    """Layouts of the same local elements, for global values of other shapes.

    The axes of a dimension may be those of one of local size 1 in front of it, and back.
    """
    for at, place in enumerate(layout.dims):
        if not place or not is_simple(place) or not isinstance(place[0], str):
            continue
        for to in range(len(shape)):
            low, high = sorted((at, to))
            rest = layout.dims[low:at] + layout.dims[at + 1 : high + 1]
            if at != to and not any(rest) and all(size == 1 for size in shape[low:high]):
                dims = list(layout.dims)
                dims[at], dims[to] = WHOLE, place
                yield replace(layout, dims=tuple(dims))
