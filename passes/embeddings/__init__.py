"""`rewrite-embeddings`: chooses how lookups in sharded tables get rows of other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from irc.analysis.communication import slowest_link
from irc.analysis.topology import Topology
from irc.errors import Error
from irc.ir.core import Function, Module, Value, Weight
from irc.ir.result_names import EXACT, OVERFLOW
from irc.ir.types import Axes
from irc.ops import AllGather, Embedding
from irc.pipeline import Compilation, Pass, Stats, option, register
from irc.rewrite import permit, replace

from .choose import (
    REQUESTED,
    Asked,
    Prices,
    asked_layout,
    cheapest,
    checked_scheme,
    lines,
    misfit,
    refused,
)
from .cost import Candidate, Setting, batch_sizes, candidate
from .policy import Policy
from .requests import Requests
from .results import add_exact, count_outside, count_overflow
from .schemes import LAYOUTS, Lookup, completed, written
from .sites import Layout, Site, find_site, layout_of
from .tables import Versions, shared, table_of, table_shape

Sites = dict[Weight, list[Site]]


@register("rewrite-embeddings")
class RewriteEmbeddings(Pass):
    """Chooses, per embedding table, its sharding and how rows get to the ranks that need them.

    For after shard and before localize; `irc/passes/embeddings/schemes.py` lists the schemes.
    `scheme` is one of them, a layout (replicated, rows, columns, cyclic), auto (the cost model
    decides) or keep (tables are unchanged); `tables` has rows `PATTERN SCHEME[@AXES]` for tables by
    name, of which the first that matches decides. A replicated table is spread over the axes that
    shard its ids. A named scheme that no lookup can have is an Error. `policy` sets the result of
    an out-of-range id: zero, clamp, row:N, or error, for which the model returns the count of such
    ids. A table with other uses, such as a tied lm_head, is unchanged unless `copy` allows a second
    one. With `sentinel` tables get rows of zeros for foreign ids, and are then not read in place
    from a checkpoint. `capacity` limits cyclic schemes to so many rows per pair of ranks (0: no
    limit); ids beyond it are counted in a result, and the function @exact has no limit. With
    `distinct` equal ids of a rank need one row of it; all pairs of ids are compared. Every rank has
    the first `hot` rows of a table; lookups of them need no capacity. `memory` is the most GB per
    rank of a table, `price` the cost of a GB in microseconds per call, `topology` a file with the
    machine's constants.
    """

    view = "global"
    behind = ("inline", "shard")

    scheme: str = option(
        default="auto",
        help="sharding of embeddings: auto, RA, ...",
        keyword="embedding",
        metavar="SCHEME",
        expects='the name of a scheme, such as "auto"',
        one_rank="holds all weights",
    )
    tables: list[str] = []  # noqa: RUF012
    policy: str = option(
        default="zero",
        help="out-of-range ids of embeddings: zero, clamp, row:k, error",
        keyword="outside",
        metavar="POLICY",
        expects='one of "zero", "clamp", "row:k", "error"',
    )
    copy: bool = False
    sentinel: bool = True
    capacity: int = 0
    distinct: bool = False
    hot: int = 0
    memory: float | None = None
    price: float = 35.0
    topology: str = ""

    def configured(self, compilation: Compilation) -> Pass | None:
        options = compilation.options
        if not {"embedding", "outside"} & options.keys():
            return None
        scheme = self.scheme if compilation.module.mesh.ranks == 1 else "keep"
        scheme, policy = options.get("embedding", scheme), options.get("outside", self.policy)
        Policy.parse(policy, "--outside")
        return dataclasses.replace(self, scheme=scheme, policy=policy)

    def run(self, module: Module, stats: Stats) -> None:
        if module.local:
            raise Error("rewrite-embeddings comes before localize: the module is in the local view")
        _Rewriting(self, module, stats).run()


class _Rewriting:
    """One run of the pass."""

    def __init__(self, options: RewriteEmbeddings, module: Module, stats: Stats) -> None:
        self.options, self.module, self.stats = options, module, stats
        self.policy = Policy.parse(options.policy)
        rows = [Asked.parse(row) for row in options.tables]
        self.asked = Requests(rows, checked_scheme(options.scheme))
        if options.capacity < 0:
            raise Error("capacity cannot be negative; 0 is no limit")
        if options.distinct and not options.capacity:
            raise Error("distinct saves rows of a capacity, and there is none; set capacity")
        if options.hot < 0:
            raise Error("hot cannot be negative; it is the number of rows that every rank has")
        if options.memory is not None and not options.memory >= 0:
            raise Error("memory cannot be negative; it is the most GB per rank of a table")
        if not options.price >= 0:
            raise Error("price cannot be negative; it is the cost of a GB in microseconds per call")
        memory = None if options.memory is None else options.memory * 1e9
        self.prices = Prices(options.price, memory, options.copy)
        self._topology: Topology | None = None
        self.lost: dict[Function, list[Value]] = {}
        self.tables = dict.fromkeys(table_of(op.table) for op in self._lookups())

    def run(self) -> None:
        """Rewrite ids, then tables, then add the results that report errors to callers."""
        if self.policy.kind == "error":
            for function in self.module.functions.values():
                ops = _lookups(function)
                added = count_outside(function, ops, self.module.mesh)
                self.stats.count("results", added)
        for op in self._lookups():
            self._keep_inside(op)
        for table, sites in self._sites().items():
            self._table(table, sites)
        if self.module.mesh.ranks > 1:
            self.asked.check(self.tables)
        for function, lost in self.lost.items():
            self._overflow(function, lost)

    @property
    def topology(self) -> Topology:
        """The machine's constants, read when first needed."""
        if self._topology is None:
            from irc.analysis.topology_file import default_topology, read_topology

            name = self.options.topology
            self._topology = read_topology(name) if name else default_topology()
        return self._topology

    def _keep_inside(self, op: Embedding) -> None:
        table = op.table
        if not self.policy.moves or op.inside or not permit("rewrite-embeddings", op):
            return
        gather = op.ids.producer
        gathered = isinstance(gather, AllGather)
        ids = gather.x if gathered else op.ids  # every rank has its own ids
        ids = self.policy.kept_inside(ids, table_shape(table_of(table))[0], str(table.name))
        ids = gather.rebuilt([ids]).result if gathered else ids
        replace(op, Embedding(ids, table, inside=True, sentinel=op.sentinel))
        self.stats.count(self.policy.kind)

    def _lookups(self) -> list[Embedding]:
        """The lookups in weights, in order."""
        return [op for each in self.module.functions.values() for op in _lookups(each)]

    def _sites(self) -> Sites:
        found: Sites = {}
        lookups = self._lookups()
        over = _axes_of_ids(lookups)
        for op in lookups:
            table = table_of(op.table)
            asked = self.asked.of(table)
            if asked.scheme == "keep":
                continue
            split = table.type.axes[0] or table.type.axes[1]
            if split and asked.axes not in ((), split):
                raise Error(
                    f"tables asks for @{table.name} over {'.'.join(asked.axes)}, but it is "
                    f"{table.type} already; leave @{'.'.join(asked.axes)} out"
                )
            other = asked_layout(asked) not in (None, layout_of(table))
            site = find_site(op, self._axes(asked) or over.get(table), other)
            if isinstance(site, Site) and self.module.mesh.group_size(site.axes) == 1:
                site = "its axes have one rank"
            if isinstance(site, Site):
                found.setdefault(table, []).append(site)
            elif self.module.mesh.ranks > 1:
                self._leave(table, site)
        return found

    def _leave(self, table: Weight, why: str) -> None:
        """Explain why lookups are not rewritten."""
        asked = self.asked.of(table)
        self.stats.explain(f"@{table.name} is not rewritten: {why}")
        if asked_layout(asked) == layout_of(table):
            self.asked.met(asked)
        else:
            self.asked.unmet(asked, table, why)

    def _axes(self, asked: Asked) -> Axes | None:
        """The axes over which a row of `tables` shards a replicated table."""
        if asked.axes:
            self.module.mesh.group_size(asked.axes)  # an Error for an axis that the mesh lacks
            return asked.axes
        known = tuple(axis for axis in ("ep", "tp") if axis in self.module.mesh.names)
        return known if asked in self.asked.rows and known else None

    def _table(self, table: Weight, sites: list[Site]) -> None:
        first = sites[0]
        if any(site.axes != first.axes for site in sites):
            self._leave(table, "its lookups differ in axes")
            return
        asked = self.asked.of(table)
        wrong = misfit(asked, sites)
        if wrong is not None and first.layout == "replicated" and asked is self.asked.rest:
            self._leave(table, wrong[1])
            return
        if wrong is not None:
            op, why = wrong
            name = asked.scheme.upper()
            raise Error(f"@{table.name} cannot be looked up by {name}: {why}", op)
        layout = asked_layout(asked)
        if layout is not None:
            self.asked.met(asked)
        tied = shared(table, [site.op for site in sites])
        versions = Versions(self.module, table, first.axes, tied, self.options.hot)
        options = self._candidates(sites, versions, tied)
        chosen = layout or cheapest(options, self.prices, first.layout)
        reason = "it costs least" if layout is None else REQUESTED
        if layout is None and any(each.refused for each in options[chosen]):
            reason = "no scheme is allowed, so it stays"
        for number, site in enumerate(sites):
            shown = [options[each][number] for each in LAYOUTS]
            sizes = batch_sizes(site, self.module)
            for line in lines(site, sizes, shown, chosen, reason):
                self.stats.explain(line)
        if self.options.hot and chosen != "replicated":
            self.stats.explain(_about_hot(versions, tied, versions.hot_rows(chosen)))
        if not permit("rewrite-embeddings", first.op):
            return
        for site in sites:
            self._rewrite(site, chosen, versions)

    def _candidates(
        self, sites: Sequence[Site], versions: Versions, tied: bool
    ) -> dict[Layout, list[Candidate]]:
        mesh, axes = self.module.mesh, sites[0].axes
        setting = Setting(
            module=self.module,
            topology=self.topology,
            link=slowest_link(mesh.groups(axes), self.topology),
            group_size=versions.group_size,
            capacity=self.options.capacity,
            sentinel=self.options.sentinel,
        )
        return {
            layout: [
                refused(candidate(site, layout, versions, tied, setting), self.prices, tied)
                for site in sites
            ]
            for layout in LAYOUTS
        }

    def _rewrite(self, site: Site, layout: Layout, versions: Versions) -> None:
        pieces = versions.rows(layout)
        own = versions.keep and layout == versions.layout
        sentinel = self.options.sentinel and layout != "replicated" and not own
        hot = versions.hot(layout)
        same = layout == versions.layout and len(pieces) == 1 and hot is None
        if same and (site.op.sentinel == sentinel or (site.op.inside and layout != "rows")):
            return
        function = site.op.parent
        assert function is not None
        lookup = Lookup(
            site=site,
            ids=site.ids if site.wanted == "sharded" else site.op.ids,
            pieces=versions.pieces(layout),
            rows=pieces,
            layout=layout,
            group_size=versions.group_size,
            inside=site.op.inside,
            sentinel=sentinel,
            capacity=self.options.capacity,
            queues=self._queues(site),
            hot=hot,
            distinct=self.options.distinct,
        )
        value, lost = written(lookup)
        if lookup.keeps_end:
            replace(site.op, value)
        else:
            replace(site.end or site.op, completed(site, value))
        if lost:
            self.lost.setdefault(function, []).extend(lost)
        self.stats.count(layout)

    def _queues(self, site: Site) -> tuple[int, ...]:
        """The number of shards of each dimension of the ids: each has a capacity of its own."""
        mesh = self.module.mesh
        counts = [mesh.group_size(axes) for axes in site.ids.type.axes]
        if site.wanted == "scattered":
            counts[site.dim] *= mesh.group_size(site.axes)
        return tuple(counts)

    def _overflow(self, function: Function, lost: list[Value]) -> None:
        if function is not self.module.main:
            raise Error(
                f"capacity is for lookups of @{self.module.main.name}, which reports the ids that "
                f"exceeded the capacity, and @{function.name} has one; put inline in front, or "
                "leave capacity out"
            )
        if OVERFLOW in function.result_names() or EXACT in self.module.functions:
            raise Error(
                f"@{function.name} would return {OVERFLOW}, and @{EXACT} without a capacity, but "
                "one of these names is taken; rename it, or leave capacity out"
            )
        count_overflow(function, lost)
        add_exact(self.module, function)
        self.stats.explain(
            f"@{function.name} returns {OVERFLOW}, the ids that exceeded the capacity; where it is "
            f"not 0, @{EXACT} gives the right results"
        )


def _lookups(function: Function) -> list[Embedding]:
    """The lookups in weights, in order."""
    return [op for op in function if isinstance(op, Embedding) and isinstance(op.table, Weight)]


def _about_hot(versions: Versions, tied: bool, count: int) -> str:
    """A sentence about the rows that every rank has."""
    name = f"@{versions.table.name}"
    if count:
        return f"{name}: its first {count} rows are on every rank"
    why = "it has other uses" if tied else f"it has {versions.shape[0]} rows"
    return f"{name}: hot has no effect, because {why}"


def _axes_of_ids(lookups: Sequence[Embedding]) -> dict[Weight, Axes]:
    """Per table, the axes over which the ids of its first sharded lookup are sharded."""
    found: dict[Weight, Axes] = {}
    for op in lookups:
        for axes in filter(None, op.ids.type.axes):
            found.setdefault(table_of(op.table), axes)
    return found
