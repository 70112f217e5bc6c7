"""Sizes as scripts write them: names and ranges of those of inputs, numbers per dimension."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from .errors import ScriptError

Sizes = int | Sequence[int]
Ranges: TypeAlias = tuple[tuple[int, int, int], ...]  # (min, opt, max) per profile


class Range(NamedTuple):
    """One dimension: its symbol, and its range in every profile."""

    name: str
    profiles: Ranges

    @property
    def merged(self) -> tuple[int, int, int]:
        """(min, opt, max) over all profiles; opt is that of the largest profile."""
        largest = max(self.profiles, key=lambda sizes: (sizes[2], sizes[1]))
        return min(low for low, _, _ in self.profiles), largest[1], largest[2]


def ranges_of(name: str, shape: Sequence[int], dim_range: Any) -> list[Range | None]:
    """The range of every dimension of an input; None where it is static, or a profile has it.

    `dim_range` has, by the names of the dimensions, a number or (min, opt, max) per profile.
    """
    if dim_range is None:
        return [None] * len(shape)
    try:
        rows = [Range(_symbol(key), tuple(map(_range, row))) for key, row in dim_range.items()]
        counts = {len(row.profiles) for row in rows}
        static = [{*row.profiles} == {(n,) * 3} for row, n in zip(rows, shape, strict=True)]
        if len(counts) != 1 or 0 in counts or static != [size >= 0 for size in shape]:
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise ScriptError(
            f"the input {name} of shape {list(shape)}: expected a dim_range such as "
            "OrderedDict(batch=[(1, 4, 8)], hidden=[64]), with a size or (min, opt, max) in rising "
            f"order per dimension and profile, found {dim_range}"
        ) from None
    return [row if size < 0 else None for row, size in zip(rows, shape, strict=True)]


def _symbol(key: str) -> str:
    symbol = re.sub(r"\W", "_", key)
    return symbol if re.match(r"[A-Za-z_]", symbol) else f"d{symbol}"


def _range(row: Any) -> tuple[int, int, int]:
    sizes: Any = [*row] if isinstance(row, (list, tuple)) else [row]
    low, best, high = (int(size) for size in (sizes * 3 if len(sizes) == 1 else sizes))
    if not 0 <= low <= best <= high:
        raise ValueError
    return low, best, high


class OptimizationProfile:
    """The ranges of the shapes of inputs, as scripts state them to TensorRT's builder."""

    def __init__(self) -> None:
        self._shapes: dict[str, list[Sequence[int]]] = {}

    def set_shape(
        self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None:
        """The smallest, most frequent and largest shape of an input."""
        self._shapes[input] = [tuple(min), tuple(opt), tuple(max)]

    def set_shape_input(self, input: str, min: Any, opt: Any, max: Any) -> None:
        """Accepted: irc has no inputs whose elements are sizes, and refuses them where used."""

    def ranges(self, input: str) -> list[tuple[int, int, int]] | None:
        """(min, opt, max) of every dimension of an input; None if they are not set."""
        rows = self._shapes.get(input)
        return None if rows is None else [_range(row) for row in zip(*rows, strict=True)]


def per_dimension(sizes: Any, count: int, least: int = 0) -> tuple[int, ...]:
    """A number per dimension, each at least `least`."""
    numbers: tuple[Any, ...] = (sizes,) * count if isinstance(sizes, (int, float)) else tuple(sizes)
    if len(numbers) != count or min(numbers) < least:
        expected = f"expected {count} numbers of at least {least}, or one for all"
        raise ScriptError(f"{expected}, found {sizes}")
    return numbers
