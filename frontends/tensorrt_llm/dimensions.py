"""The names and ranges of the dynamic sizes of an input, as `dim_range` gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from ...errors import Error
from ...source import here

Ranges: TypeAlias = tuple[tuple[int, int, int], ...]  # (min, opt, max) per profile


class Range(NamedTuple):
    """One dimension: its symbol, and its range in every profile."""

    name: str
    profiles: Ranges

    @property
    def merged(self) -> tuple[int, int, int]:
        """(min, opt, max) over all profiles; opt is that of the largest profile."""
        low, _, high = (list(column) for column in zip(*self.profiles, strict=True))
        largest = max(self.profiles, key=lambda each: (each[2], each[1]))
        return min(low), largest[1], max(high)


def ranges_of(name: str, shape: Sequence[int], dim_range: Any) -> list[Range | None]:
    """The range of every dimension of an input; None where it is static and has none."""
    if dim_range is None:
        if any(size < 0 for size in shape):
            raise _error(name, shape, "a dim_range for the sizes that are -1, found none")
        return [None] * len(shape)
    if not isinstance(dim_range, Mapping):
        found = type(dim_range).__name__
        raise _error(name, shape, f"an OrderedDict as dim_range, found a {found}")
    rows = cast("Mapping[str, Any]", dim_range)
    if len(rows) != len(shape):
        raise _error(
            name, shape, f"a dim_range per dimension, found {len(rows)}: {', '.join(rows)}"
        )
    counts = {len(row) for row in rows.values()}
    if len(counts) != 1 or 0 in counts:
        raise _error(name, shape, f"as many profiles in every range, found {sorted(counts)}")
    return [
        _range(name, shape, size, key, row)
        for size, (key, row) in zip(shape, rows.items(), strict=True)
    ]


def _range(name: str, shape: Sequence[int], size: int, key: str, row: Any) -> Range | None:
    profiles = tuple(_profile(name, shape, key, each) for each in row)
    if size >= 0:
        wrong = next((each for each in profiles if each != (size,) * 3), None)
        if wrong is not None:
            raise _error(name, shape, f"the size {size} in the range of {key}, found {wrong}")
        return None
    symbol = re.sub(r"\W", "_", key)
    return Range(symbol if re.match(r"[A-Za-z_]", symbol) else f"d{symbol}", profiles)


def _profile(name: str, shape: Sequence[int], key: str, given: Any) -> tuple[int, int, int]:
    listed = cast("Sequence[Any]", given) if isinstance(given, (list, tuple)) else [given]
    sizes = [int(each) for each in listed]
    sizes = sizes * 3 if len(sizes) == 1 else sizes
    if len(sizes) != 3 or not 0 <= sizes[0] <= sizes[1] <= sizes[2]:
        raise _error(name, shape, f"(min, opt, max) in rising order for {key}, found {given}")
    return sizes[0], sizes[1], sizes[2]


def _error(name: str, shape: Sequence[int], expected: str) -> Error:
    return Error(f"the input {name} of shape {list(shape)}: expected {expected}", loc=here())
