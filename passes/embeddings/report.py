"""The candidates of a table as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from irc.units import amount

from .choose import why
from .cost import Candidate
from .sites import Layout, Site

ASKED = "it was asked for"


def lines(
    site: Site, sizes: Sequence[int], found: Sequence[Candidate], chosen: Layout, reason: str
) -> list[str]:
    """A sentence about the site, and a line per candidate: bytes, microseconds, memory."""
    tokens = "/".join(map(str, sizes))
    scheme = next(c.scheme for c in found if c.layout == chosen)
    asked = reason == ASKED
    head = (
        f"@{site.table.name}, {site.table.type.whole}, is looked up by {scheme}: {reason}; "
        f"{why(site)}. Per call of {tokens} tokens:"
    )
    return [head, *(_line(each, each.layout == chosen, asked) for each in found)]


def _line(found: Candidate, chosen: bool, asked: bool) -> str:
    times = "/".join(f"{us:.1f}" for us in found.us)
    data = "/".join(amount(n) for n in found.sent)
    shared = " (shared)" if not found.extra else ""
    note = f"; {found.refused}" if found.refused else ""
    note += (", as asked" if chosen and asked and note else "") + ("; chosen" if chosen else "")
    return (
        f"  {found.scheme:<3} {times} us, sends {data}, holds {amount(found.memory)}{shared}{note}"
    )
