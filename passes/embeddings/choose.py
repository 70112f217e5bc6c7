"""The layout of a table: the requested one, or the cheapest; its report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from irc.analysis.units import amount
from irc.errors import Error, did_you_mean
from irc.ir.core import Op, Weight
from irc.ir.types import Axes

from .cost import BITWISE, Candidate
from .schemes import ENDS, LAYOUTS, NOT_SHARDED, Layout, Site, scheme_name

# Weights of the fewest, typical and most tokens: decoding calls the model once per token.
WEIGHTS = (0.9, 0.09, 0.01)
PER_GB = 35.0  # microseconds per call that 10^9 bytes on each rank are worth
REQUESTED = "it was requested"
FREE = ("auto", "keep")  # schemes that name no layout
_NAMES: dict[str, Layout] = {
    name: layout
    for layout in LAYOUTS
    for name in (layout, *(scheme_name(layout, wanted).lower() for wanted in ENDS))
}


@dataclass(frozen=True)
class TableRequest:
    """`PATTERN SCHEME[@AXES]`: the scheme requested for tables of such names."""

    pattern: str
    scheme: str
    axes: Axes = ()

    @staticmethod
    def parse(text: str) -> TableRequest:
        """A row of the option `tables`."""
        words = text.split()
        if len(words) != 2:
            raise Error(
                f"tables has {text!r}; a row is a pattern and a scheme, such as "
                '"*.embed_tokens.weight ca", or "*.position.weight ca@tp" for a replicated table'
            )
        scheme, _, axes = words[1].partition("@")
        return TableRequest(words[0], checked_scheme(scheme), tuple(filter(None, axes.split("."))))

    def __str__(self) -> str:
        over = f"@{'.'.join(self.axes)}" if self.axes else ""
        return f"{self.pattern} {self.scheme}{over}"

    @property
    def layout(self) -> Layout | None:
        """The layout of the scheme; None for auto and keep."""
        return _NAMES.get(self.scheme)

    def matches(self, table: Weight) -> bool:
        """Whether the pattern is for a table."""
        return fnmatchcase(table.name, self.pattern)

    def unfit(self, sites: Sequence[Site]) -> tuple[Op, str] | None:
        """(the lookup that cannot have the requested scheme, the reason), if there is one."""
        if self.layout is None or self.scheme == self.layout:
            return None
        for site in sites:
            if self.scheme != scheme_name(self.layout, site.wanted).lower():
                fitting = ", ".join(scheme_name(other, site.wanted) for other in LAYOUTS)
                return site.op, f"{rows_needed(site)}; use one of {fitting}"
        return None


def checked_scheme(name: str) -> str:
    """A scheme or layout, in lower case, or auto or keep."""
    scheme = name.lower()
    if scheme not in FREE and scheme not in _NAMES:
        raise Error(
            f"there is no scheme {name!r}{did_you_mean(scheme, [*FREE, *_NAMES])}; there are auto, "
            "keep, replicated, rows, columns, cyclic, RA, RS, RSD, CA, CS, CD, KA, KS, KD"
        )
    return scheme


class TableRequests:
    """The rows of the option `tables`, then the scheme for all other tables."""

    def __init__(self, rows: Sequence[TableRequest], scheme: str) -> None:
        self.rows, self.rest = list(rows), TableRequest("*", scheme)
        self._satisfied: set[TableRequest] = set()
        # per request, whether the table is merely not sharded, and the reason of its rejection
        self._rejected: dict[TableRequest, list[tuple[bool, str]]] = {}

    def of(self, table: Weight) -> TableRequest:
        """The request for one table: the first row that matches, else the scheme of all."""
        return next((row for row in self.rows if row.matches(table)), self.rest)

    def satisfy(self, request: TableRequest) -> None:
        """Record a lookup that got the requested scheme."""
        self._satisfied.add(request)

    def reject(self, request: TableRequest, table: Weight, reason: str) -> None:
        """Record the reason why a lookup did not get the requested scheme."""
        plain = reason == NOT_SHARDED
        if plain:
            reason = (
                f"{reason}; shard it by a row of the plan, such as {table.name} 0@AXIS, or here by "
                f'tables=["{table.name} {request.scheme}@AXIS"]'
            )
        self._rejected.setdefault(request, []).append((plain, f"@{table.name}: {reason}"))

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
            if request.layout is None or request in self._satisfied:
                continue
            left = f"of the tables that are looked up ({shown}) none is left for it"
            reasons = self._rejected.get(request, [(True, left)])
            # other reasons say more than that a table is replicated
            _, reason = min(reasons, key=lambda rejection: rejection[0])
            raise Error(f"{request.scheme} was requested, but no lookup can have it: {reason}")


def rows_needed(site: Site) -> str:
    """The rows that a site needs, as a clause."""
    over = f"over {site.axis}"
    if site.wanted == "replicated":
        return f"its result must be replicated {over}"
    if site.wanted == "scattered":
        return f"its ids are replicated and dimension {site.dim} of its result is sharded {over}"
    return f"dimension {site.dim} of its ids is sharded {over}, and of its result as well"


def with_rejection(candidate: Candidate, memory: float | None, copy: bool, tied: bool) -> Candidate:
    """The candidate, with the reason why it is rejected if it is.

    `memory` is the most bytes that a table may take on a rank; `copy` allows a second one of a
    `tied` table.
    """
    if tied and candidate.extra and not copy:
        return replace(candidate, rejection="takes a second copy of a table with other uses")
    if memory is not None and candidate.extra > memory:
        return replace(candidate, rejection=f"takes more than {memory / 1e9:g} GB")
    return candidate


def cheapest(options: dict[Layout, list[Candidate]], present: Layout) -> Layout:
    """The layout whose sites cost least together with the memory; of equal ones that with fewer
    collectives, then an exact one, then R, columns, rows, cyclic; `present` if none is allowed."""
    order: tuple[Layout, ...] = ("replicated", "columns", "rows", "cyclic")

    def key(layout: Layout) -> tuple[float, int, bool]:
        candidates = options[layout]
        time = sum(c.mean(WEIGHTS) for c in candidates) + PER_GB * candidates[0].extra / 1e9
        exact = all(c.scheme in BITWISE for c in candidates)
        return round(time, 3), sum(c.messages for c in candidates), not exact

    rejected = {layout for layout in LAYOUTS if any(c.rejection for c in options[layout])}
    allowed: list[Layout] = [layout for layout in order if layout not in rejected]
    return min(allowed, key=key) if allowed else present


def report_rows(
    site: Site, sizes: Sequence[int], candidates: Sequence[Candidate], chosen: Layout, reason: str
) -> list[str]:
    """A sentence about the site, and a line per candidate: bytes, microseconds, memory."""
    tokens = "/".join(map(str, sizes))
    scheme = next(c.scheme for c in candidates if c.layout == chosen)
    head = (
        f"@{site.table.name}, {site.table.type.replicated}, is looked up by {scheme}: {reason}; "
        f"{rows_needed(site)}. Per call of {tokens} tokens:"
    )
    return [head, *(_row(c, c.layout == chosen, reason == REQUESTED) for c in candidates)]


def _row(candidate: Candidate, chosen: bool, requested: bool) -> str:
    times = "/".join(f"{us:.1f}" for us in candidate.us)
    data = "/".join(amount(n) for n in candidate.sent)
    shared = " (shared)" if not candidate.extra else ""
    note = f"; {candidate.rejection}" if candidate.rejection else ""
    note += ", as asked" if chosen and requested and note else ""
    note += "; chosen" if chosen else ""
    held = f"{amount(candidate.memory)}{shared}"
    return f"  {candidate.scheme:<3} {times} us, sends {data}, holds {held}{note}"
