"""What is asked for the tables of a module, and whether any lookup got it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from irc.core import Weight
from irc.errors import Error

from .choose import Asked, asked_layout
from .sites import UNSPLIT


class Requests:
    """The rows of the option `tables`, and behind them the scheme for all other tables."""

    def __init__(self, rows: Sequence[Asked], scheme: str) -> None:
        self.rows, self.rest = list(rows), Asked("*", scheme)
        self._met: set[Asked] = set()
        self._unmet: dict[Asked, list[tuple[bool, str]]] = {}  # whether that is plain, and why

    def of(self, table: Weight) -> Asked:
        """What is asked for one table: the first row that fits, else the scheme of all."""
        found = next((row for row in self.rows if fnmatchcase(table.name, row.pattern)), None)
        return found or self.rest

    def met(self, asked: Asked) -> None:
        """A lookup is done as asked."""
        self._met.add(asked)

    def unmet(self, asked: Asked, table: Weight, why: str) -> None:
        """A lookup stays as it is, for a reason."""
        plain = why == UNSPLIT
        if plain:
            why = (
                f"{why}; split it by a row of the plan, such as {table.name} 0@AXIS, or here by "
                f'tables=["{table.name} {asked.scheme}@AXIS"]'
            )
        self._unmet.setdefault(asked, []).append((plain, f"@{table.name}: {why}"))

    def check(self, tables: Collection[Weight]) -> None:
        """An Error about a row that decides for no table, or about a scheme that no lookup got."""
        shown = ", ".join(f"@{table.name}" for table in list(tables)[:3])
        for row in self.rows:
            fitting = [table for table in tables if fnmatchcase(table.name, row.pattern)]
            if not fitting:
                there = f"those are {shown}" if shown else "there is none"
                raise Error(
                    f'tables has "{row}", but no table that is looked up has such a name; {there}'
                )
            if not any(self.of(table) is row for table in fitting):
                raise Error(
                    f'tables has "{row}", but an earlier row decides for all of them; put it '
                    "first, or leave it out"
                )
        for asked in (*self.rows, self.rest):
            if asked_layout(asked) is None or asked in self._met:
                continue
            reasons = self._unmet.get(asked)
            if reasons:  # others tell more than that a table is whole
                _, why = min(reasons, key=lambda reason: reason[0])
                raise Error(f"{asked.scheme} was asked for, but no lookup can have it: {why}")
            if not tables:
                raise Error(
                    f"{asked.scheme} was asked for, but this module looks nothing up in a weight; "
                    "leave it out"
                )
            if not any(self.of(table) is asked for table in tables):
                raise Error(
                    f"{asked.scheme} was asked for, but rows of tables decide for every table; "
                    "leave it out"
                )
