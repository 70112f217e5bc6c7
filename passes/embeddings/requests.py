"""The schemes requested for the tables of a module, and whether any lookup got them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from irc.errors import Error
from irc.ir.core import Weight

from .choose import Asked, asked_layout
from .sites import NOT_SHARDED


class Requests:
    """The rows of the option `tables`, then the scheme for all other tables."""

    def __init__(self, rows: Sequence[Asked], scheme: str) -> None:
        self.rows, self.rest = list(rows), Asked("*", scheme)
        self._met: set[Asked] = set()
        # per request, whether the table is merely not sharded, and why it is not met
        self._unmet: dict[Asked, list[tuple[bool, str]]] = {}

    def of(self, table: Weight) -> Asked:
        """The request for one table: the first row that matches, else the scheme of all."""
        found = next((row for row in self.rows if fnmatchcase(table.name, row.pattern)), None)
        return found or self.rest

    def met(self, asked: Asked) -> None:
        """Record a lookup that got the requested scheme."""
        self._met.add(asked)

    def unmet(self, asked: Asked, table: Weight, why: str) -> None:
        """Record why a lookup did not get the requested scheme."""
        plain = why == NOT_SHARDED
        if plain:
            why = (
                f"{why}; shard it by a row of the plan, such as {table.name} 0@AXIS, or here by "
                f'tables=["{table.name} {asked.scheme}@AXIS"]'
            )
        self._unmet.setdefault(asked, []).append((plain, f"@{table.name}: {why}"))

    def check(self, tables: Collection[Weight]) -> None:
        """An Error about a row that matches no table, or a scheme that no lookup got."""
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
            if reasons:  # other reasons say more than that a table is replicated
                _, why = min(reasons, key=lambda reason: reason[0])
                raise Error(f"{asked.scheme} was requested, but no lookup can have it: {why}")
            if not tables:
                raise Error(
                    f"{asked.scheme} was requested, but this module looks nothing up in a weight; "
                    "leave it out"
                )
            if not any(self.of(table) is asked for table in tables):
                raise Error(
                    f"{asked.scheme} was requested, but rows of tables decide for every table; "
                    "leave it out"
                )
