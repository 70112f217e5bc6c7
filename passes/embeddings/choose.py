"""The layout of a table: the requested one, or the cheapest; its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from irc.analysis.units import amount
from irc.errors import Error, did_you_mean
from irc.ir.core import Op
from irc.ir.types import Axes

from .cost import BITWISE, Candidate
from .schemes import ENDS, LAYOUTS, scheme_name
from .sites import Layout, Site

# Weights of the fewest, typical and most tokens: decoding calls the model once per token.
WEIGHTS = (0.9, 0.09, 0.01)
REQUESTED = "it was requested"
FREE = ("auto", "keep")  # schemes that name no layout
_NAMES: dict[str, Layout] = {
    name: layout
    for layout in LAYOUTS
    for name in (layout, *(scheme_name(layout, wanted).lower() for wanted in ENDS))
}


@dataclass(frozen=True)
class Asked:
    """`PATTERN SCHEME[@AXES]`: the scheme requested for tables of such names."""

    pattern: str
    scheme: str
    axes: Axes = ()

    @staticmethod
    def parse(text: str) -> Asked:
        """A row of the option `tables`."""
        words = text.split()
        if len(words) != 2:
            raise Error(
                f"tables has {text!r}; a row is a pattern and a scheme, such as "
                '"*.embed_tokens.weight ca", or "*.position.weight ca@tp" for a replicated table'
            )
        scheme, _, axes = words[1].partition("@")
        return Asked(words[0], checked_scheme(scheme), tuple(filter(None, axes.split("."))))

    def __str__(self) -> str:
        over = f"@{'.'.join(self.axes)}" if self.axes else ""
        return f"{self.pattern} {self.scheme}{over}"


def checked_scheme(name: str) -> str:
    """A known scheme or layout, in lower case, or auto or keep."""
    found = name.lower()
    if found not in FREE and found not in _NAMES:
        raise Error(
            f"there is no scheme {name!r}{did_you_mean(found, [*FREE, *_NAMES])}; there are auto, "
            "keep, replicated, rows, columns, cyclic, RA, RS, RSD, CA, CS, CD, KA, KS, KD"
        )
    return found


def asked_layout(asked: Asked) -> Layout | None:
    """The layout of a scheme; None for auto and keep."""
    return _NAMES.get(asked.scheme)


def misfit(asked: Asked, sites: Sequence[Site]) -> tuple[Op, str] | None:
    """(the lookup that cannot have the requested scheme, why), if there is one."""
    layout = asked_layout(asked)
    if layout is None or asked.scheme == layout:
        return None
    for site in sites:
        if asked.scheme != scheme_name(layout, site.wanted).lower():
            fitting = ", ".join(scheme_name(other, site.wanted) for other in LAYOUTS)
            return site.op, f"{why(site)}; use one of {fitting}"
    return None


def why(site: Site) -> str:
    """The rows that a site needs, as a clause."""
    over = f"over {site.axis}"
    if site.wanted == "replicated":
        return f"its result must be replicated {over}"
    if site.wanted == "scattered":
        return f"its ids are replicated and dimension {site.dim} of its result is sharded {over}"
    return f"dimension {site.dim} of its ids is sharded {over}, and of its result as well"


@dataclass(frozen=True)
class Prices:
    """`per_gb`: microseconds per call that 10^9 bytes on each rank are worth. `memory`: the most
    bytes that a table may take on a rank. `copy`: whether a tied table may be there twice."""

    per_gb: float
    memory: float | None
    copy: bool


def refused(found: Candidate, prices: Prices, tied: bool) -> Candidate:
    """The candidate, with the reason why it is refused if it is."""
    if tied and found.extra and not prices.copy:
        return replace(found, refused="takes a second copy of a table with other uses")
    if prices.memory is not None and found.extra > prices.memory:
        return replace(found, refused=f"takes more than {prices.memory / 1e9:g} GB")
    return found


def cheapest(options: dict[Layout, list[Candidate]], prices: Prices, present: Layout) -> Layout:
    """The layout whose sites cost least together with the memory; of equal ones that with fewer
    collectives, then an exact one, then R, columns, rows, cyclic; `present` if none is allowed."""
    layouts: list[Layout] = [each for each in LAYOUTS if not any(c.refused for c in options[each])]
    if not layouts:
        return present
    order: tuple[Layout, ...] = ("replicated", "columns", "rows", "cyclic")

    def key(layout: Layout) -> tuple[float, int, bool, int]:
        found = options[layout]
        time = sum(c.mean(WEIGHTS) for c in found) + prices.per_gb * found[0].extra / 1e9
        exact = all(c.scheme in BITWISE for c in found)
        return round(time, 3), sum(c.messages for c in found), not exact, order.index(layout)

    return min(layouts, key=key)


def lines(
    site: Site, sizes: Sequence[int], found: Sequence[Candidate], chosen: Layout, reason: str
) -> list[str]:
    """A sentence about the site, and a line per candidate: bytes, microseconds, memory."""
    tokens = "/".join(map(str, sizes))
    scheme = next(c.scheme for c in found if c.layout == chosen)
    asked = reason == REQUESTED
    head = (
        f"@{site.table.name}, {site.table.type.replicated}, is looked up by {scheme}: {reason}; "
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
