"""The device mesh: named axes over ranks, the first axis slowest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import cast

import numpy as np

from ..errors import Error, did_you_mean

AXES = ("pp", "dp", "cp", "ep", "tp")  # those that irc has a use for, slowest first
MOST_RANKS = 1 << 14
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, such as `pp=2, tp=4`; ranks count through the last axis first."""

    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not _NAME.fullmatch(name):
                raise Error(f"{name!r} is not a valid name for a mesh axis; use letters, digits, _")
            if names.count(name) > 1:
                raise Error(f"the mesh has the axis {name!r} twice")
            if size < 1:
                raise Error(f"mesh axis {name}={size} must have at least one rank")
        if self.ranks > MOST_RANKS:
            raise Error(f"the mesh ({self}) has {self.ranks} ranks; {MOST_RANKS} are the most")

    @staticmethod
    def parse(text: str | Mapping[str, int] | Mesh) -> Mesh:
        """A mesh from `tp=2,pp=1` or {"tp": 2, "pp": 1}; an empty one is a mesh of one rank.

        The axes that irc has a use for come in rank order whatever the text says: pipeline stages
        slowest, tensor parallelism, which talks most, fastest; others stay in front.
        """
        if isinstance(text, Mesh):
            return text
        axes = _listed(text) if isinstance(text, str) else _checked(text)
        return Mesh(tuple(sorted(axes, key=lambda axis: _place(axis[0]))))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The axis names, slowest first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """The number of ranks along `axis`."""
        for name, size in self.axes:
            if name == axis:
                return size
        raise Error(f"the mesh ({self}) has no axis {axis!r}{did_you_mean(axis, self.names)}")

    def group_size(self, axes: tuple[str, ...]) -> int:
        """The number of ranks over `axes`: how many shards a dimension has."""
        return prod(self.size(axis) for axis in axes)

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """The index of `rank` along every axis."""
        place = np.unravel_index(rank, [size for _, size in self.axes])
        return dict(zip(self.names, map(int, place), strict=True))

    def index(self, rank: int, axes: tuple[str, ...]) -> int:
        """The index of the shard of `rank` in a dimension sharded over `axes`."""
        place = self.coordinates(rank)
        position = 0
        for axis in axes:
            position = position * self.size(axis) + place[axis]
        return position

    def groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """The ranks that communicate over `axes`: one list per group, in the order of `axes`."""
        for axis in axes:
            self.size(axis)
        order = [*(name for name in self.names if name not in axes), *axes]
        ranks = np.arange(self.ranks).reshape([size for _, size in self.axes])
        turned = ranks.transpose([self.names.index(name) for name in order])
        return turned.reshape(-1, self.group_size(axes)).tolist()


def _place(axis: str) -> int:
    """The position of an axis in rank order."""
    return AXES.index(axis) if axis in AXES else -1


def _listed(text: str) -> list[tuple[str, int]]:
    """The axes in `tp=2,pp=1`."""
    axes: list[tuple[str, int]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([A-Za-z_]\w*)=(\d{1,9})", item)
        if match is None:
            raise Error(f"cannot read the mesh axis {item!r}; write it as name=size, as in tp=2")
        axes.append((match[1], int(match[2])))
    return axes


def _checked(table: object) -> list[tuple[str, int]]:
    """The axes in {"tp": 2, "pp": 1}."""
    if not isinstance(table, Mapping):
        raise Error(f'a mesh is text such as "tp=2", or {{"tp": 2}}, not {table!r}')
    axes = list(cast("Mapping[object, object]", table).items())
    for name, size in axes:
        if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool):
            raise Error(f"a mesh has names of axes and whole numbers, not {name!r}: {size!r}")
    return cast("list[tuple[str, int]]", axes)
