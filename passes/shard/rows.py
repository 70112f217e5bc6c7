"""Rows of a sharding plan: the mesh axes of the dimensions of the weights of some name.

`*.q_proj.weight 0@tp` shards the rows of every weight with such a name over tp; `replicated`
replicates it; `0@tp, 1@ep` shards two dimensions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from irc.errors import Error
from irc.ir.types import Axes

_SPLIT = re.compile(r"(\d+)@([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


@dataclass(frozen=True)
class Row:
    """One row: a pattern, the axes of dimensions, and the source of the row.

    A row that a user wrote must match something in the model: `must_fit`. Of the rows of one
    `entry` of a tp_plan one must. A row for `tables` is for weights that only lookups use, whatever
    their names.
    """

    pattern: str
    splits: tuple[tuple[int, Axes], ...]
    source: str
    must_fit: bool = False
    entry: str = ""
    tables: bool = False

    def fits(self, name: str, looked_up: bool = False) -> bool:
        """Whether a weight or argument has such a name; `looked_up` says that it is a table."""
        return (looked_up or not self.tables) and fnmatchcase(name, self.pattern)

    @property
    def axes(self) -> Axes:
        """The axes that it names."""
        return tuple(axis for _, axes in self.splits for axis in axes)

    def __str__(self) -> str:
        how = ", ".join(f"{dim}@{'.'.join(axes)}" for dim, axes in self.splits)
        return f"{self.pattern} {how or 'replicated'}"


def row(text: str, source: str) -> Row:
    """A row from its text; an Error says what is wrong with it."""
    pattern, _, how = text.strip().partition(" ")
    if how.strip() == "replicated":
        return Row(pattern, (), source)
    splits: list[tuple[int, Axes]] = []
    for item in filter(None, (part.strip() for part in how.split(","))):
        match = _SPLIT.fullmatch(item)
        if match is None:
            raise Error(
                f"{source}: cannot read {item!r} in {text.strip()!r}; a row is a pattern and "
                "dimension@axis, such as *.q_proj.weight 0@tp, or the word replicated"
            )
        splits.append((int(match[1]), tuple(match[2].split("."))))
    if not splits:
        raise Error(f"{source}: {text.strip()!r} names no dimension and axis")
    return Row(pattern, tuple(splits), source)


def find_row(rows: list[Row], name: str, looked_up: bool = False) -> Row | None:
    """The first row that matches a name. `looked_up`: the weight is a table of lookups."""
    return next((row for row in rows if row.fits(name, looked_up)), None)
