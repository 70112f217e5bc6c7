"""Which sites of a module are quantized, by which scheme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from irc.errors import Error, did_you_mean
from irc.ir.core import Op
from irc.ops import Embedding, Linear, Matmul, Topk
from irc.quantization.sites import Site

from .table import Row

DEFAULT_EXCLUDE = ("*lm_head", "*embed_out", "*router", "*shared_expert_gate")
_DEPTH = 8  # operations between the scores of a router and the choice of the largest


@dataclass(frozen=True)
class Selection:
    """The options of the pass about sites.

    `base` is the row of sites that no row of the table matches. `exclude` None stands for
    `DEFAULT_EXCLUDE`, routers and tied weights, which a glob of `include` or a row of the table
    brings back. `include` None is everything.
    """

    base: Row | None
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    table: Sequence[Row]

    def rows(self, sites: Sequence[Site], weights: Sequence[str]) -> dict[str, Row]:
        """The row of every site to quantize, by name; a glob has to match one of the weights."""
        self._check_globs(sites, weights)
        found = {site.name: self._row(site) for site in sites}
        return {name: row for name, row in found.items() if row is not None}

    def why_not(self, site: Site) -> str:
        """Why a site stays as it is."""
        usual = _usual_reason(site) if self.exclude is None else ""
        return usual or "its name is excluded, or not included"

    def _row(self, site: Site) -> Row | None:
        if _fits(site, self.exclude or ()):
            return None
        if self.include is not None and not _fits(site, self.include):
            return None
        row = next((row for row in self.table if _fits(site, [row.glob])), None)
        if row is not None and row.scheme is None:
            return None
        asked = self.include is not None or (row is not None and row.glob != "*")
        if self.exclude is None and not asked and _usual_reason(site):
            return None
        return row or self.base

    def _check_globs(self, sites: Sequence[Site], weights: Sequence[str]) -> None:
        """An Error about a glob that matches nothing."""
        globs = [*(self.include or ()), *(self.exclude or ()), *(row.glob for row in self.table)]
        names = [*(site.name for site in sites), *weights]
        for glob in globs:
            if glob != "*" and not any(fnmatchcase(name, glob) for name in names):
                shown = f"they are called {', '.join(names[:3])} and so on" if names else "none"
                near = did_you_mean(glob, names)
                raise Error(f"{glob!r} fits no layer of this module{near}; {shown}")


def _fits(site: Site, globs: Iterable[str]) -> bool:
    names = (site.name, site.weight.name)
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


def _usual_reason(site: Site) -> str:
    """Why a site is excluded unless it is asked for; empty if it is not."""
    if _fits(site, DEFAULT_EXCLUDE):
        return "such layers are left out unless include names them"
    if any(isinstance(user, Embedding) for user in site.weight.users):
        return "its weight is also the table of an embedding"
    if _chooses(site.op, _DEPTH):
        return "it routes tokens: the largest of its results are chosen"
    return ""


def _chooses(op: Op, depth: int) -> bool:
    """Whether a topk chooses among the results of an operation, without a product before it."""
    users = {user for result in op.results for user in result.users}
    return any(
        isinstance(user, Topk)
        or (depth > 0 and not isinstance(user, (Linear, Matmul)) and _chooses(user, depth - 1))
        for user in users
    )
