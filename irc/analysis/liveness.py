"""Which values are alive between groups of operations that run one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from ..core import Op, Value


def alive_between(place: Mapping[Op, int], groups: int) -> list[list[Value]]:
    """Per group the values that were made in an earlier one and are used in it or later.

    `place` maps operations, in program order, to the number of their group; no value is used in
    an earlier group than it is made in. Operations that are not in it neither make nor use.
    """
    alive: list[list[Value]] = [[] for _ in range(groups)]
    for op, first in place.items():
        for value in op.results:
            last = max((place.get(user, first) for user in value.users), default=first)
            for group in range(first + 1, last + 1):
                alive[group].append(value)
    return alive
