"""Which sites of a module are quantized, by which scheme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from irc.errors import Error, did_you_mean
from irc.ir.core import Op
from irc.ops import Embedding, Linear, Matmul, Topk
from irc.quantization.schemes import scheme_called
from irc.quantization.sites import Site

from .table import Row

HEADS = ("*lm_head", "*embed_out")
HEAD = "lm_head.weight"  # the name by which plans and globs find the weight of a tied head
# What a head gets that no option names. In examples/outlier_llama it adds 0.0001 nats per token to
# the divergence of a scheme, a head in w4a16 0.0067 to the 0.0519 of all layers.
HEAD_SCHEME = "w8a16"
_ROUTERS = ("*router", "*shared_expert_gate")
_DEPTH = 8  # operations between the scores of a router and the choice of the largest


@dataclass(frozen=True)
class Selection:
    """The options of the pass about sites.

    `base` is the row of sites that no row of the table matches. `include` None is everything.
    Routers stay as they are, and heads get `HEAD_SCHEME`, unless a glob of `include` or a row of
    the table names them, or `exclude` is empty.
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
        if not _fits(site, self.exclude or ()) and self._is_exception(site) and _routes(site):
            return "it routes tokens; it is left out unless include names it"
        return "its name is excluded, or not included"

    def _row(self, site: Site) -> Row | None:
        if _fits(site, self.exclude or ()):
            return None
        if self.include is not None and not _fits(site, self.include):
            return None
        row = self._table_row(site) or self.base
        if row is None or (row is not self.base and row.scheme is None):
            return None
        if not self._is_exception(site):
            return row
        if is_head(site):
            return Row(row.glob, scheme_called(HEAD_SCHEME))
        return None if _routes(site) else row

    def _table_row(self, site: Site) -> Row | None:
        return next((row for row in self.table if _fits(site, [row.glob])), None)

    def _is_exception(self, site: Site) -> bool:
        """Whether no option names the site, so that what is usual for routers and heads applies."""
        row = self._table_row(site)
        named = self.include is not None or (row is not None and row.glob != "*")
        return not named and (self.exclude is None or len(self.exclude) > 0)

    def _check_globs(self, sites: Sequence[Site], weights: Sequence[str]) -> None:
        """An Error about a glob that matches nothing."""
        globs = [*(self.include or ()), *(self.exclude or ()), *(row.glob for row in self.table)]
        names = [*(name for site in sites for name in _names(site)), *weights]
        for glob in globs:
            if glob != "*" and not any(fnmatchcase(name, glob) for name in names):
                shown = f"they are called {', '.join(names[:3])} and so on" if names else "none"
                near = did_you_mean(glob, names)
                raise Error(f"{glob!r} fits no layer of this module{near}; {shown}")


def is_head(site: Site) -> bool:
    """Whether a site makes logits: by its name, or because its weight is an embedding's table."""
    return _is_tied(site) or _fits(site, HEADS)


def _is_tied(site: Site) -> bool:
    return any(isinstance(user, Embedding) for user in site.weight.users)


def _names(site: Site) -> tuple[str, ...]:
    """The names of a site for globs: its scope, its weight, and of a tied head also those that it
    has once its weight is its own."""
    tied = (HEAD.removesuffix(".weight"), HEAD) if _is_tied(site) else ()
    return (site.name, site.weight.name, *tied)


def _fits(site: Site, globs: Iterable[str]) -> bool:
    names = _names(site)
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


def _routes(site: Site) -> bool:
    """Whether a site routes tokens: by its name, or because its largest results are chosen."""
    return _fits(site, _ROUTERS) or _chooses(site.op, _DEPTH)


def _chooses(op: Op, depth: int) -> bool:
    """Whether a topk chooses among the results of an operation, without a product before it."""
    users = {user for result in op.results for user in result.users}
    return any(
        isinstance(user, Topk)
        or (depth > 0 and not isinstance(user, (Linear, Matmul)) and _chooses(user, depth - 1))
        for user in users
    )
