"""The schemes: the sharding of a table, and the collectives that bring each rank its rows.

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

from irc import ops
from irc.ir.core import Op, Value, Weight
from irc.ir.dims import DimLike
from irc.ops.table_rows import ROUND

from .sites import Layout, Site, Wanted

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
    `capacity`, `queues` and `distinct` are those of cyclic_embedding, `group_size` the number of
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
    distinct: bool = False

    @property
    def keeps_end(self) -> bool:
        """Whether the collective of the site completes the rows as before."""
        adds = isinstance(self.site.end, (ops.AllReduce, ops.ReduceScatter))
        return self.layout == "rows" and adds and self.hot is None


def written(lookup: Lookup) -> tuple[Value, list[Value]]:
    """The rows of a site as a new expression, and the counts of ids beyond the capacity."""
    site, lost = lookup.site, list[Value]()
    if lookup.keeps_end:
        return _pieced(lookup, site.op.ids, lost), lost
    if lookup.hot is None:
        return _complete(lookup, lookup.ids, lost), lost
    count = lookup.hot.type.shape[0]
    assert isinstance(count, int)
    cold, ids = _behind(lookup.ids, count)
    rows = _complete(lookup, ids, lost)
    ids, cold = _placed(lookup, lookup.ids), _placed(lookup, cold.result)
    hot = ops.Embedding(ids, lookup.hot)
    return ops.Where(ops.Unsqueeze(cold, dims=(-1,)), rows, hot).result, lost


def _complete(lookup: Lookup, ids: Value, lost: list[Value]) -> Value:
    """The rows that the ranks need, by the collectives of the scheme."""
    site, wanted = lookup.site, lookup.site.wanted
    if lookup.layout == "cyclic":
        return _pieced(lookup, ids, lost)
    if lookup.layout == "replicated":
        if wanted == "scattered":
            ids = ops.ShardSlice(ids, axis=site.axis, dim=site.dim).result
        return _pieced(lookup, ids, lost)
    if wanted == "sharded":
        ids = ops.AllGather(ids, axis=site.axis, dim=site.dim).result
    rows = _pieced(lookup, ids, lost)
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


def _pieced(lookup: Lookup, ids: Value, lost: list[Value]) -> Value:
    """The rows from every piece of the table; each id is in one of them."""
    found = _rows(lookup, 0, ids, lost)
    begin = lookup.rows[0]
    for number in range(1, len(lookup.pieces)):
        here, own = _behind(ids, begin)
        rows = _rows(lookup, number, own, lost)
        place = here.result
        if lookup.layout == "cyclic":
            place = _placed(lookup, place)
        found = ops.Where(ops.Unsqueeze(place, dims=(-1,)), rows, found).result
        begin += lookup.rows[number]
    return found


def _behind(ids: Value, begin: int) -> tuple[Op, Value]:
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


def _rows(lookup: Lookup, number: int, ids: Value, lost: list[Value]) -> Value:
    table = lookup.pieces[number]
    if lookup.layout != "cyclic":
        # a piece gets the ids of all pieces
        inside = lookup.inside and len(lookup.pieces) == 1 and lookup.hot is None
        sentinel = lookup.sentinel and not (inside and lookup.layout != "rows")
        result = ops.Embedding(ids, table, inside=inside, sentinel=sentinel).result
        result.name = lookup.site.op.result.name
        return result
    site = lookup.site
    found = ops.CyclicEmbedding(
        ids,
        table,
        rows=lookup.rows[number],
        parts=lookup.group_size,
        axis=site.axis,
        scatter=site.dim if site.wanted == "scattered" else -1,
        capacity=lookup.capacity,
        queues=lookup.queues if lookup.capacity else (),
        distinct=lookup.distinct,
    )
    if lookup.capacity:
        lost.append(found.results[1])
    return found.results[0]


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
