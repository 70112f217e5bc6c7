"""Lookups in sharded tables, and their schemes: the collectives that bring each rank its rows.

| scheme | table | collectives |
|---|---|---|
| R | replicated | none |
| RA, RS, RSD | rows | all_reduce; reduce_scatter; ids, then reduce_scatter |
| CA, CS, CD | columns | all_gather; all_to_all; ids, then all_to_all |
| KA, KS, KD | cyclic | all_gather of rows; all_to_all; all_to_all of ids and of rows |

The last letter says which rows a rank gets: A all of them, S those of its shard of the ids, D those
of its own ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from irc import ops
from irc.ir.core import Op, Value, Weight
from irc.ir.dims import DimLike
from irc.ir.types import Axes
from irc.ops.collective import Exchange
from irc.ops.table_rows import ROUND

from ..shared.edit import only_user

Wanted: TypeAlias = Literal["replicated", "scattered", "sharded"]
Layout: TypeAlias = Literal["replicated", "rows", "columns", "cyclic"]
NOT_SHARDED = "its table is not sharded"


@dataclass(frozen=True)
class Site:
    """One lookup whose table is sharded over `axes`, or will be.

    `ids` are those that a rank has before any are gathered. The result is needed `replicated`;
    `scattered`, sharded in `dim` though the ids are replicated; or `sharded` in `dim` as the ids
    are. `chain` are additive operations on the way to `end`, the collective that completes the
    result. Where they move rows, the lookup itself is needed `replicated`, and what `end` scatters
    is sliced.
    """

    op: ops.Embedding
    table: Weight
    axes: Axes
    ids: Value
    wanted: Wanted
    dim: int = 0
    chain: tuple[Op, ...] = ()
    end: Op | None = None

    @property
    def axis(self) -> str:
        """The axes as collectives have them."""
        return ".".join(self.axes)

    @property
    def layout(self) -> Layout:
        """How the table is sharded now."""
        return layout_of(self.table)


def layout_of(table: Weight) -> Layout:
    """How a table [V, D] is sharded."""
    rows, columns = table.type.axes
    return "rows" if rows else "columns" if columns else "replicated"


def find_site(op: ops.Embedding, axes: Axes | None, other: bool = False) -> Site | str:
    """The site of a lookup, or why it is kept. `axes` are for a replicated table.

    With `other` the table gets another layout, even where its columns are used as they are sharded.
    """
    table = op.table
    assert isinstance(table, Weight)
    rows, columns = table.type.axes
    if rows and columns:
        return "its rows and its columns are sharded"
    if not rows and not columns:
        return _replicated(op, table, axes) if axes else NOT_SHARDED
    walked = _walk_sum(op, rows) if rows else _walk_columns(op, columns)
    if isinstance(walked, str):
        return Site(op, table, columns, op.ids, "replicated") if other and columns else walked
    chain, end, dim = walked
    if dim is None or any(each.result.type is not op.result.type for each in chain):
        return Site(op, table, rows or columns, op.ids, "replicated", 0, chain, end)
    if dim >= op.ids.type.ndim:
        return "its result is sharded in the columns of the table"
    gather = op.ids.producer
    if isinstance(gather, ops.AllGather) and gather.axes == (rows or columns):
        rank = gather.x.type.ndim
        if gather.dim % rank == dim and gather.x.type.axes[dim] == gather.axes:
            return Site(op, table, gather.axes, gather.x, "sharded", dim, chain, end)
    return Site(op, table, rows or columns, op.ids, "scattered", dim, chain, end)


def _replicated(op: ops.Embedding, table: Weight, axes: Axes) -> Site | str:
    """A site whose result is replicated, or sharded as its ids are."""
    for dim, over in enumerate(op.ids.type.axes):
        if over == axes:
            return Site(op, table, axes, op.ids, "sharded", dim)
        if set(over) & set(axes):
            return f"its ids are {op.ids.type}"
    return Site(op, table, axes, op.ids, "replicated")


Walk: TypeAlias = tuple[tuple[Op, ...], Op, int | None]


def _walk_sum(op: ops.Embedding, axes: Axes) -> Walk | str:
    """(additive operations, the collective that completes the sum, the dimension it scatters)."""
    chain: list[Op] = []
    value = op.result
    while True:
        user = only_user(value)
        if user is None:
            return "its partial sum is used in several places"
        if isinstance(user, ops.AllReduce) and user.axes == axes:
            return tuple(chain), user, None
        if isinstance(user, ops.ReduceScatter) and user.axes == axes:
            return tuple(chain), user, user.dim % value.type.ndim
        if not _is_additive(user, value, axes):
            return f"its partial sum is an operand of {user.opname}"
        chain.append(user)
        value = user.results[0]


def _walk_columns(op: ops.Embedding, axes: Axes) -> Walk | str:
    """The same for columns, which an all_gather or an all_to_all joins."""
    user, last = only_user(op.result), op.result.type.ndim - 1
    if user is None:
        return "its columns are used in several places"
    if isinstance(user, ops.AllGather) and user.axes == axes and user.dim % (last + 1) == last:
        return (), user, None
    if isinstance(user, ops.AllToAll) and user.axes == axes and user.concat % (last + 1) == last:
        return (), user, user.split % (last + 1)
    return f"{user.opname} takes its columns as they are sharded"


def _is_additive(op: Op, value: Value, axes: Axes) -> bool:
    """Whether the sum of an operation's results over the ranks is its result for their sum."""
    if len(op.results) != 1 or isinstance(op, (Exchange, ops.Call)):
        return False
    others = [v for v in op.operands if v is not value]
    waits = set(axes) <= set(op.result.type.partial)
    return waits and not any(set(axes) & set(v.type.partial) for v in others)


LETTERS: dict[Layout, str] = {"replicated": "R", "rows": "R", "columns": "C", "cyclic": "K"}
ENDS: dict[Wanted, str] = {"replicated": "A", "scattered": "S", "sharded": "D"}
LAYOUTS: tuple[Layout, ...] = ("replicated", "rows", "columns", "cyclic")


def scheme_name(layout: Layout, wanted: Wanted) -> str:
    """`RA`, `CS`, ... ; rows for data-parallel ids are RSD, as a reduce_scatter ends them."""
    if layout == "replicated":
        return "R"
    if layout == "rows" and wanted == "sharded":
        return "RSD"
    return LETTERS[layout] + ENDS[wanted]


@dataclass(frozen=True)
class Lookup:
    """A lookup to write: the ids of the site, and the table in pieces of rows.

    `inside` says that all ids are in range; `sentinel` that rows of zeros may follow the table.
    `capacity` and `queues` are those of cyclic_embedding, `group_size` the number of
    ranks over the axes. `hot` are the first rows, which every rank has, so that the pieces begin
    behind them.
    """

    site: Site
    ids: Value
    pieces: tuple[Weight, ...]
    rows: tuple[int, ...]
    layout: Layout
    group_size: int
    inside: bool = False
    sentinel: bool = False
    capacity: int = 0
    queues: tuple[int, ...] = ()
    hot: Weight | None = None

    @property
    def keeps_end(self) -> bool:
        """Whether the collective of the site completes the rows as before."""
        adds = isinstance(self.site.end, (ops.AllReduce, ops.ReduceScatter))
        return self.layout == "rows" and adds and self.hot is None


def write_lookup(lookup: Lookup) -> tuple[Value, list[Value]]:
    """The rows of a site as a new expression, and the capacities that its ids need."""
    site, needed = lookup.site, list[Value]()
    if lookup.keeps_end:
        return _pieced(lookup, site.op.ids, needed), needed
    if lookup.hot is None:
        return _complete(lookup, lookup.ids, needed), needed
    count = lookup.hot.type.shape[0]
    assert isinstance(count, int)
    cold, ids = _from_row(lookup.ids, count)
    rows = _complete(lookup, ids, needed)
    ids, cold = _placed(lookup, lookup.ids), _placed(lookup, cold.result)
    hot = ops.Embedding(ids, lookup.hot)
    return ops.Where(ops.Unsqueeze(cold, dims=(-1,)), rows, hot).result, needed


def _complete(lookup: Lookup, ids: Value, needed: list[Value]) -> Value:
    """The rows that the ranks need, by the collectives of the scheme."""
    site, wanted = lookup.site, lookup.site.wanted
    if lookup.layout == "cyclic":
        return _pieced(lookup, ids, needed)
    if lookup.layout == "replicated":
        if wanted == "scattered":
            ids = ops.ShardSlice(ids, axis=site.axis, dim=site.dim).result
        return _pieced(lookup, ids, needed)
    if wanted == "sharded":
        ids = ops.AllGather(ids, axis=site.axis, dim=site.dim).result
    rows = _pieced(lookup, ids, needed)
    return _finished(rows, site, lookup.layout).result


def completed(site: Site, value: Value) -> Value:
    """The result of the site from complete rows, by new operations."""
    source, end = site.op.result, site.end
    for op in site.chain:
        value = op.rebuilt([value if v is source else v for v in op.operands]).result
        source = op.result
    if isinstance(end, ops.ReduceScatter) and site.wanted == "replicated":
        return ops.ShardSlice(value, axis=site.axis, dim=end.dim).result
    if end is None and source.type.axes[-1] == site.axes:  # columns, used as they were sharded
        return ops.ShardSlice(value, axis=site.axis, dim=source.type.ndim - 1).result
    return value


def _finished(rows: Value, site: Site, layout: Layout) -> Op:
    if layout == "rows":
        if site.wanted == "replicated":
            return ops.AllReduce(rows, axis=site.axis)
        return ops.ReduceScatter(rows, axis=site.axis, dim=site.dim)
    last = rows.type.ndim - 1
    if site.wanted == "replicated":
        return ops.AllGather(rows, axis=site.axis, dim=last)
    return ops.AllToAll(rows, axis=site.axis, split=site.dim, concat=last)


def _pieced(lookup: Lookup, ids: Value, needed: list[Value]) -> Value:
    """The rows from every piece of the table; each id is in one of them."""
    joined = _rows(lookup, 0, ids, needed)
    begin = lookup.rows[0]
    for number in range(1, len(lookup.pieces)):
        here, own = _from_row(ids, begin)
        rows = _rows(lookup, number, own, needed)
        place = here.result
        if lookup.layout == "cyclic":
            place = _placed(lookup, place)
        joined = ops.Where(ops.Unsqueeze(place, dims=(-1,)), rows, joined).result
        begin += lookup.rows[number]
    return joined


def _from_row(ids: Value, begin: int) -> tuple[Op, Value]:
    """(which ids are rows from `begin` on, the ids relative to it, -1 for all before)."""
    start = ops.Constant(values=(begin,), dtype=ids.type.dtype)
    here = ops.Ge(ids, start)
    # ids before the piece become -1, since a subtraction could overflow
    before = ops.Constant(values=(begin - 1,), dtype=ids.type.dtype)
    return here, ops.Sub(ops.Where(here, ids, before), start).result


def _placed(lookup: Lookup, value: Value) -> Value:
    """What is known per id, sharded as the rows are."""
    site = lookup.site
    if site.wanted == "scattered":
        return ops.ShardSlice(value, axis=site.axis, dim=site.dim).result
    return value


def _rows(lookup: Lookup, number: int, ids: Value, needed: list[Value]) -> Value:
    table = lookup.pieces[number]
    if lookup.layout != "cyclic":
        # a piece gets the ids of all pieces
        inside = lookup.inside and len(lookup.pieces) == 1 and lookup.hot is None
        sentinel = lookup.sentinel and not (inside and lookup.layout != "rows")
        result = ops.Embedding(ids, table, inside=inside, sentinel=sentinel).result
        result.name = lookup.site.op.result.name
        return result
    site = lookup.site
    lookup_op = ops.CyclicEmbedding(
        ids,
        table,
        rows=lookup.rows[number],
        parts=lookup.group_size,
        axis=site.axis,
        scatter=site.dim if site.wanted == "scattered" else -1,
        capacity=lookup.capacity,
        queues=lookup.queues if lookup.capacity else (),
    )
    if lookup.capacity:
        needed.append(lookup_op.results[1])
    return lookup_op.results[0]


def piece_rows(rows: int, width: DimLike, group_size: int, limit: int) -> tuple[int, ...]:
    """The rows of the pieces of a table, each shared by `group_size` ranks: as few as keep
    each below `limit` elements of `width` per rank."""
    if not isinstance(width, int) or not width:
        return (rows,)
    per_rank = max(1, (limit - 1) // width - ROUND)
    most = per_rank * group_size
    if rows <= most:
        return (rows,)
    even = -(-rows // -(-rows // most))
    size = -(-even // group_size) * group_size
    return tuple(min(size, rows - at) for at in range(0, rows, size))
