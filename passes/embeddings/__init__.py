"""`rewrite-embeddings`: chooses how lookups in sharded tables get rows of other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

from irc.analysis.communication import slowest_link
from irc.analysis.topology import Topology
from irc.errors import Error
from irc.ir.core import Function, Module, Value, Weight
from irc.ir.result_names import OVERFLOW
from irc.ir.types import Axes
from irc.ops import AllGather, Embedding
from irc.pipeline import Compilation, Pass, Stats, option, register
from irc.rewrite import permit, replace

from .choose import (
    REQUESTED,
    TableRequest,
    TableRequests,
    cheapest,
    checked_scheme,
    report_rows,
    with_rejection,
)
from .cost import Candidate, CostContext, batch_sizes, candidate
from .policy import Policy, count_out_of_range, return_overflow
from .schemes import LAYOUTS, Layout, Lookup, Site, completed, find_site, layout_of, write_lookup
from .tables import Versions, has_other_uses, table_of, table_shape


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
    limit); where a call needs more, a result says how many, and runtimes turn it into an Error.
    Every rank has the first `hot` rows of a table; lookups of them need no capacity. `memory` is
    the most GB per rank of a table, `topology` a file with the machine's constants.
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
    hot: int = 0
    memory: float | None = None
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
        rows = [TableRequest.parse(row) for row in options.tables]
        self.requests = TableRequests(rows, checked_scheme(options.scheme))
        for name in ("capacity", "hot", "memory"):
            number = getattr(options, name)
            if number is not None and not number >= 0:
                raise Error(f"{name} cannot be negative; it is {number}")
        self.needed: dict[Function, list[Value]] = {}  # capacities
        self.tables = dict.fromkeys(table_of(op.table) for op in self._lookups())

    def run(self) -> None:
        """Rewrite ids, then tables, then add the results that report errors to callers."""
        if self.policy.kind == "error":
            for function in self.module.functions.values():
                ops = _lookups(function)
                added = count_out_of_range(function, ops, self.module.mesh)
                self.stats.count("results", added)
        for op in self._lookups():
            self._replace_ids(op)
        for table, sites in self._sites().items():
            self._table(table, sites)
        if self.module.mesh.ranks > 1:
            self.requests.check(self.tables)
        for function, needed in self.needed.items():
            self._overflow(function, needed)

    def _replace_ids(self, op: Embedding) -> None:
        table = op.table
        if not self.policy.moves or op.inside or not permit("rewrite-embeddings", op):
            return
        gather = op.ids.producer
        gathered = isinstance(gather, AllGather)
        ids = gather.x if gathered else op.ids  # every rank has its own ids
        ids = self.policy.replaced(ids, table_shape(table_of(table))[0], str(table.name))
        ids = gather.rebuilt([ids]).result if gathered else ids
        replace(op, Embedding(ids, table, inside=True, sentinel=op.sentinel))
        self.stats.count(self.policy.kind)

    def _lookups(self) -> list[Embedding]:
        """The lookups in weights, in order."""
        return [op for each in self.module.functions.values() for op in _lookups(each)]

    def _sites(self) -> dict[Weight, list[Site]]:
        """The lookups to rewrite, by table."""
        sites: dict[Weight, list[Site]] = {}
        lookups = self._lookups()
        over = _axes_of_ids(lookups)
        for op in lookups:
            table = table_of(op.table)
            request = self.requests.of(table)
            if request.scheme == "keep":
                continue
            split = table.type.axes[0] or table.type.axes[1]
            if split and request.axes not in ((), split):
                raise Error(
                    f"tables asks for @{table.name} over {'.'.join(request.axes)}, but it is "
                    f"{table.type} already; leave @{'.'.join(request.axes)} out"
                )
            other = request.layout not in (None, layout_of(table))
            site = find_site(op, self._axes(request) or over.get(table), other)
            if isinstance(site, Site) and self.module.mesh.group_size(site.axes) == 1:
                site = "its axes have one rank"
            if isinstance(site, Site):
                sites.setdefault(table, []).append(site)
            elif self.module.mesh.ranks > 1:
                self._leave(table, site)
        return sites

    def _leave(self, table: Weight, reason: str) -> None:
        """Explain why lookups are not rewritten."""
        request = self.requests.of(table)
        self.stats.explain(f"@{table.name} is not rewritten: {reason}")
        if request.layout == layout_of(table):
            self.requests.satisfy(request)
        else:
            self.requests.reject(request, table, reason)

    def _axes(self, request: TableRequest) -> Axes | None:
        """The axes over which a row of `tables` shards a replicated table."""
        if request.axes:
            self.module.mesh.group_size(request.axes)  # an Error for an axis that the mesh lacks
            return request.axes
        usual = tuple(axis for axis in ("ep", "tp") if axis in self.module.mesh.names)
        return usual if request in self.requests.rows and usual else None

    def _table(self, table: Weight, sites: list[Site]) -> None:
        first = sites[0]
        if any(site.axes != first.axes for site in sites):
            self._leave(table, "its lookups differ in axes")
            return
        request = self.requests.of(table)
        unfit = request.unfit(sites)
        if unfit is not None and first.layout == "replicated" and request is self.requests.rest:
            self._leave(table, unfit[1])
            return
        if unfit is not None:
            op, reason = unfit
            name = request.scheme.upper()
            raise Error(f"@{table.name} cannot be looked up by {name}: {reason}", op)
        if request.layout is not None:
            self.requests.satisfy(request)
        tied = has_other_uses(table, [site.op for site in sites])
        versions = Versions(self.module, table, first.axes, tied, self.options.hot)
        options = self._candidates(sites, versions, tied)
        chosen = request.layout or cheapest(options, first.layout)
        reason = "it costs least" if request.layout is None else REQUESTED
        if request.layout is None and any(c.rejection for c in options[chosen]):
            reason = "no scheme is allowed, so it stays"
        for number, site in enumerate(sites):
            candidates = [options[layout][number] for layout in LAYOUTS]
            sizes = batch_sizes(site, self.module)
            for row in report_rows(site, sizes, candidates, chosen, reason):
                self.stats.explain(row)
        if self.options.hot and chosen != "replicated":
            self.stats.explain(_about_hot(versions, tied, versions.hot_rows(chosen)))
        if not permit("rewrite-embeddings", first.op):
            return
        for site in sites:
            self._rewrite(site, chosen, versions)

    @cached_property
    def _topology(self) -> Topology:
        """The machine's constants, read when first needed."""
        from irc.analysis.topology_file import default_topology, read_topology

        name = self.options.topology
        return read_topology(name) if name else default_topology()

    def _candidates(
        self, sites: Sequence[Site], versions: Versions, tied: bool
    ) -> dict[Layout, list[Candidate]]:
        options, topology = self.options, self._topology
        link = slowest_link(self.module.mesh.groups(sites[0].axes), topology)
        group_size, capacity = versions.group_size, options.capacity
        context = CostContext(
            self.module, topology, link, group_size, capacity, sentinel=options.sentinel
        )
        memory = None if options.memory is None else options.memory * 1e9

        def cost(site: Site, layout: Layout) -> Candidate:
            plain = candidate(site, layout, versions, tied, context)
            return with_rejection(plain, memory, options.copy, tied)

        return {layout: [cost(site, layout) for site in sites] for layout in LAYOUTS}

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
        )
        value, needed = write_lookup(lookup)
        if lookup.keeps_end:
            replace(site.op, value)
        else:
            replace(site.end or site.op, completed(site, value))
        if needed:
            self.needed.setdefault(function, []).extend(needed)
        self.stats.count(layout)

    def _queues(self, site: Site) -> tuple[int, ...]:
        """The number of shards of each dimension of the ids: each has a capacity of its own."""
        mesh = self.module.mesh
        counts = [mesh.group_size(axes) for axes in site.ids.type.axes]
        if site.wanted == "scattered":
            counts[site.dim] *= mesh.group_size(site.axes)
        return tuple(counts)

    def _overflow(self, function: Function, needed: list[Value]) -> None:
        if function is not self.module.main:
            raise Error(
                f"capacity is for lookups of @{self.module.main.name}, which returns the capacity "
                f"that they need, and @{function.name} has one; put inline in front, or leave "
                "capacity out"
            )
        if OVERFLOW in function.result_names():
            raise Error(
                f"@{function.name} would return {OVERFLOW}, but the name is taken; rename it, or "
                "leave capacity out"
            )
        return_overflow(function, needed)
        self.stats.explain(
            f"@{function.name} returns {OVERFLOW}: the capacity that a call needs beyond "
            f"{self.options.capacity}, else 0"
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
    over: dict[Weight, Axes] = {}
    for op in lookups:
        for axes in filter(None, op.ids.type.axes):
            over.setdefault(table_of(op.table), axes)
    return over
