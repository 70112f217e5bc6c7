"""`rewrite-embeddings`: chooses how lookups in sharded tables get rows of other ranks."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from irc.analysis.topology import Topology
from irc.errors import Error
from irc.ir.core import Function, Module, Value, Weight
from irc.ir.result_names import OVERFLOW
from irc.ir.types import Axes
from irc.ops import AllGather, Embedding, Maximum
from irc.pipeline import Compilation, Pass, Stats, option, register
from irc.rewrite import permit, replace

from .cost import REQUESTED, Candidate, CostModel, cheapest, report
from .lookups import Lookup
from .policy import Policy, add_result, count_out_of_range, insert_at_end
from .requests import Request, Requests
from .schemes import LAYOUTS, SCHEMES, Layout, Site, find_site, layout_of
from .tables import Pieces, Table, table_of


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
        self.requests = Requests(options.tables, options.scheme)
        for name in ("capacity", "hot", "memory"):
            number = getattr(options, name)
            if number is not None and not number >= 0:
                raise Error(f"{name} cannot be negative; it is {number}")
        self.needed: dict[Function, list[Value]] = {}  # capacities

    def run(self) -> None:
        """Rewrite ids, then tables, then add the results that report errors to callers."""
        functions = self.module.functions.values()
        if self.policy.kind == "error":
            for function in functions:
                added = count_out_of_range(function, _lookups(function), self.module.mesh)
                self.stats.count("results", added)
        tables: dict[Weight, list[Embedding]] = {}
        for function in functions:
            for op in _lookups(function):
                op = self._with_policy(op)
                tables.setdefault(table_of(op.table), []).append(op)
        axes = {table: _axes_of_ids(lookups) for table, lookups in tables.items()}
        for table, lookups in tables.items():
            self._rewrite_table(table, lookups, axes[table])
        if self.module.mesh.ranks > 1:
            self.requests.check(tables)
        for function, needed in self.needed.items():
            self._return_overflow(function, needed)

    def _with_policy(self, op: Embedding) -> Embedding:
        """A lookup whose out-of-range ids are replaced, where the policy says by what."""
        table, gather = op.table, op.ids.producer
        if not self.policy.moves or op.inside or not permit("rewrite-embeddings", op):
            return op
        gathered = isinstance(gather, AllGather)
        ids = gather.x if gathered else op.ids  # every rank has its own ids
        ids = self.policy.replaced(ids, table_of(table))
        ids = gather.rebuilt([ids]).result if gathered else ids
        new = Embedding(ids, table, inside=True, sentinel=op.sentinel)
        replace(op, new)
        self.stats.count(self.policy.kind)
        return new

    def _rewrite_table(self, weight: Weight, lookups: list[Embedding], over: Axes | None) -> None:
        """Choose the layout of a table, and rewrite the lookups that may have another one."""
        request = self.requests.of(weight)
        sites = self._sites(weight, lookups, request, over)
        if not sites:
            return
        if any(site.axes != sites[0].axes for site in sites):
            self._keep(weight, request, "its lookups differ in axes")
            return
        refusal = request.refusal(sites)
        if refusal is not None:
            op, reason = refusal
            if sites[0].layout == "replicated" and request is self.requests.rest:
                self._keep(weight, request, reason)
                return
            name = request.scheme.upper()
            raise Error(f"@{weight.name} cannot be looked up by {name}: {reason}", op)
        request.is_met |= request.layout is not None
        table = Table(self.module, sites, self.options.hot)
        chosen = self._choose(table, sites, request)
        if not permit("rewrite-embeddings", sites[0].op):
            return
        pieces = table.pieces(chosen)
        for site in sites:
            self._rewrite(site, table, chosen, pieces)

    def _sites(
        self, weight: Weight, lookups: list[Embedding], request: Request, over: Axes | None
    ) -> list[Site]:
        """The lookups of a table that may be rewritten; the others are explained."""
        if request.scheme == "keep":
            return []
        mesh, axes, requested = self.module.mesh, request.axes, ".".join(request.axes)
        split = weight.type.axes[0] or weight.type.axes[1]
        if split and axes not in ((), split):
            raise Error(
                f"tables asks for @{weight.name} over {requested}, but it is {weight.type} "
                f"already; leave @{requested} out"
            )
        if axes:
            mesh.group_size(axes)  # an Error for an axis that the mesh lacks
        elif request is not self.requests.rest:
            axes = tuple(axis for axis in ("ep", "tp") if axis in mesh.names)
        other = request.layout not in (None, layout_of(weight))
        sites: list[Site] = []
        for op in lookups:
            site = find_site(op, axes or over, other)
            if isinstance(site, Site) and mesh.group_size(site.axes) == 1:
                site = "its axes have one rank"
            if isinstance(site, Site):
                sites.append(site)
            elif mesh.ranks > 1:
                self._keep(weight, request, site)
        return sites

    def _keep(self, table: Weight, request: Request, reason: str) -> None:
        """Explain why lookups are not rewritten."""
        self.stats.explain(f"@{table.name} is not rewritten: {reason}")
        if request.layout == layout_of(table):
            request.is_met = True
        else:
            request.refuse(table, reason)

    def _choose(self, table: Table, sites: list[Site], request: Request) -> Layout:
        """The layout that is requested, or else the cheapest, which is explained."""
        model = CostModel(table, self.options, self._topology)
        options: dict[Layout, list[Candidate]] = {
            layout: [model.candidate(site, layout) for site in sites] for layout in LAYOUTS
        }
        chosen = request.layout or cheapest(options)
        reason = REQUESTED if request.layout else "it costs least"
        if chosen is None:
            chosen = table.layout
            reason = "no scheme is allowed, so it stays"
        for number, site in enumerate(sites):
            candidates: dict[Layout, Candidate] = {
                layout: options[layout][number] for layout in LAYOUTS
            }
            for row in report(site, table, candidates, chosen, reason):
                self.stats.explain(row)
        if self.options.hot and chosen != "replicated":
            self.stats.explain(table.about_hot_rows(chosen))
        return chosen

    @cached_property
    def _topology(self) -> Topology:
        """The machine's constants, read when first needed."""
        from irc.analysis.topology_file import default_topology, read_topology

        name = self.options.topology
        return read_topology(name) if name else default_topology()

    def _rewrite(self, site: Site, table: Table, layout: Layout, pieces: Pieces) -> None:
        is_present = table.tied and layout == table.layout
        sentinel = self.options.sentinel and layout != "replicated" and not is_present
        same = layout == table.layout and len(pieces.rows) == 1 and pieces.hot is None
        if same and (site.op.sentinel == sentinel or (site.op.inside and layout != "rows")):
            return
        function = site.op.parent
        assert function is not None
        lookup = Lookup(
            site=site,
            scheme=SCHEMES[layout, site.wanted],
            pieces=pieces,
            mesh=self.module.mesh,
            sentinel=sentinel,
            capacity=self.options.capacity,
        )
        replace(*lookup.write())
        if lookup.needed:
            self.needed.setdefault(function, []).extend(lookup.needed)
        self.stats.count(layout)

    def _return_overflow(self, function: Function, needed: list[Value]) -> None:
        """Return the largest capacity that lookups need beyond the one they have, or 0."""
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
        largest = needed[0]
        for value in needed[1:]:
            largest = insert_at_end(function, Maximum(largest, value))
        add_result(function, OVERFLOW, largest)
        self.stats.explain(
            f"@{function.name} returns {OVERFLOW}: the capacity that a call needs beyond "
            f"{self.options.capacity}, else 0"
        )


def _lookups(function: Function) -> list[Embedding]:
    """The lookups in weights, in order."""
    return [op for op in function if isinstance(op, Embedding) and isinstance(op.table, Weight)]


def _axes_of_ids(lookups: list[Embedding]) -> Axes | None:
    """The axes over which the ids of the first lookup with sharded ids are sharded."""
    return next((axes for op in lookups for axes in op.ids.type.axes if axes), None)
