"""The schemes that are requested for tables by name, and whether lookups get them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from irc.errors import Error, did_you_mean
from irc.ir.core import Op, Weight
from irc.ir.types import Axes

from .schemes import LAYOUT_OF, LAYOUTS, NAMES, NOT_SHARDED, SCHEMES, Layout, Site

FREE = ("auto", "keep")  # they name no layout


@dataclass(eq=False)
class Request:
    """`PATTERN SCHEME[@AXES]`: the scheme requested for tables of such names.

    `is_met` says that a lookup has it; `refusals` are the reasons why others do not, each with
    whether its table is merely not sharded.
    """

    pattern: str
    scheme: str
    axes: Axes = ()
    is_met: bool = False
    refusals: list[tuple[bool, str]] = field(default_factory=list[tuple[bool, str]])

    @staticmethod
    def parse(text: str) -> Request:
        """A row of the option `tables`."""
        words = text.split()
        if len(words) != 2:
            raise Error(
                f"tables has {text!r}; a row is a pattern and a scheme, such as "
                '"*.embed_tokens.weight ca", or "*.position.weight ca@tp" for a replicated table'
            )
        scheme, _, axes = words[1].partition("@")
        return Request.of(words[0], scheme, tuple(filter(None, axes.split("."))))

    @staticmethod
    def of(pattern: str, name: str, axes: Axes = ()) -> Request:
        """A request of a scheme or a layout by name, or of auto or keep."""
        scheme = name.lower()
        if scheme not in FREE and scheme not in LAYOUT_OF:
            words = [*FREE, *LAYOUTS, *(name for name in NAMES if name != "R")]
            raise Error(
                f"there is no scheme {name!r}{did_you_mean(scheme, [*FREE, *LAYOUT_OF])}; there "
                f"are {', '.join(words)}"
            )
        return Request(pattern, scheme, axes)

    def __str__(self) -> str:
        over = f"@{'.'.join(self.axes)}" if self.axes else ""
        return f"{self.pattern} {self.scheme}{over}"

    @property
    def layout(self) -> Layout | None:
        """The layout of the scheme; None for auto and keep."""
        return LAYOUT_OF.get(self.scheme)

    def refusal(self, sites: Sequence[Site]) -> tuple[Op, str] | None:
        """(the lookup that cannot have the scheme, the reason), if there is one."""
        if self.layout is None or self.scheme == self.layout:
            return None
        for site in sites:
            if self.scheme != SCHEMES[self.layout, site.wanted].name.lower():
                fitting = ", ".join(SCHEMES[layout, site.wanted].name for layout in LAYOUTS)
                return site.op, f"{site.need}; use one of {fitting}"
        return None

    def refuse(self, table: Weight, reason: str) -> None:
        """Record why a lookup does not have the scheme."""
        is_replicated = reason == NOT_SHARDED
        if is_replicated:
            reason = (
                f"{reason}; shard it by a row of the plan, such as {table.name} 0@AXIS, or here by "
                f'tables=["{table.name} {self.scheme}@AXIS"]'
            )
        self.refusals.append((is_replicated, f"@{table.name}: {reason}"))


class Requests:
    """The rows of the option `tables`, then the scheme for all other tables."""

    def __init__(self, rows: Sequence[str], scheme: str) -> None:
        self.rows, self.rest = [Request.parse(row) for row in rows], Request.of("*", scheme)

    def of(self, table: Weight) -> Request:
        """The request for one table: the first row that matches, else the scheme of all."""
        rows = (row for row in self.rows if fnmatchcase(table.name, row.pattern))
        return next(rows, self.rest)

    def check(self, tables: Collection[Weight]) -> None:
        """An Error about a row that decides for no table, or a scheme that no lookup got."""
        shown = ", ".join(f"@{table.name}" for table in list(tables)[:3]) or "none"
        for row in self.rows:
            if not any(self.of(table) is row for table in tables):
                raise Error(
                    f'tables has "{row}", but it decides for no table that is looked up ({shown}); '
                    "the first row that matches a name decides"
                )
        for request in (*self.rows, self.rest):
            if request.layout is None or request.is_met:
                continue
            left = f"of the tables that are looked up ({shown}) none is left for it"
            # other reasons say more than that a table is replicated
            reasons = request.refusals or [(True, left)]
            _, reason = min(reasons, key=lambda refusal: refusal[0])
            raise Error(f"{request.scheme} was requested, but no lookup can have it: {reason}")
