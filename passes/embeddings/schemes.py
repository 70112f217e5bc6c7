"""The schemes: how a table lies on the ranks, and what brings each rank the rows it wants.

| scheme | table | sent |
|---|---|---|
| R | whole on every rank | nothing |
| RA, RS, RSD | rows | all_reduce; reduce_scatter; ids, then reduce_scatter |
| CA, CS, CD | columns | all_gather; all_to_all; ids, then all_to_all |
| KA, KS, KD | rows in turn | all_gather of rows; all_to_all; all_to_all of ids and of rows |

The last letter says who wants which rows: A all of them, S each rank those of its part of the ids,
D each rank those of its own ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from irc.core import Op, Value, Weight
from irc.dims import DimLike
from irc.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Constant,
    CyclicEmbedding,
    Embedding,
    Ge,
    ReduceScatter,
    ShardSlice,
    Sub,
    Unsqueeze,
    Where,
)

from ..table_rows import ROUND
from .sites import Layout, Site, Wanted

LETTERS: dict[Layout, str] = {"whole": "R", "rows": "R", "columns": "C", "cyclic": "K"}
ENDS: dict[Wanted, str] = {"all": "A", "scattered": "S", "split": "D"}
LAYOUTS: tuple[Layout, ...] = ("whole", "rows", "columns", "cyclic")


def scheme_name(layout: Layout, wanted: Wanted) -> str:
    """`RA`, `CS`, ... ; rows for data-parallel ids are RSD, as a reduce_scatter ends them."""
    if layout == "whole":
        return "R"
    if layout == "rows" and wanted == "split":
        return "RSD"
    return LETTERS[layout] + ENDS[wanted]


@dataclass(frozen=True)
class Lookup:
    """What a site is to look up: the ids that it wants, and the table in pieces of rows.

    `inside` says that no id lies outside; `sentinel` that rows of zeros may stand behind the table.
    `capacity` and `queues` are those of cyclic_embedding, `ways` the ranks over the axes.
    """

    site: Site
    ids: Value
    pieces: tuple[Weight, ...]
    rows: tuple[int, ...]
    layout: Layout
    ways: int
    inside: bool = False
    sentinel: bool = False
    capacity: int = 0
    queues: tuple[int, ...] = ()


def written(lookup: Lookup) -> tuple[Value, list[Value]]:
    """A fresh expression of the rows, as the site wants them, and of the counts of lost ids."""
    site, lost = lookup.site, list[Value]()
    if lookup.layout == "cyclic":
        return _pieced(lookup, lookup.ids, lost), lost
    ids, wanted = lookup.ids, site.wanted
    if lookup.layout == "whole":
        if wanted == "scattered":
            ids = ShardSlice(ids, axis=site.axis, dim=site.dim).result
        return _pieced(lookup, ids, lost), lost
    if wanted == "split":
        ids = AllGather(ids, axis=site.axis, dim=site.dim).result
    rows = _pieced(lookup, ids, lost)
    return _finished(rows, site, lookup.layout).result, lost


def _finished(rows: Value, site: Site, layout: Layout) -> Op:
    if layout == "rows":
        if site.wanted == "all":
            return AllReduce(rows, axis=site.axis)
        return ReduceScatter(rows, axis=site.axis, dim=site.dim)
    last = rows.type.rank - 1
    if site.wanted == "all":
        return AllGather(rows, axis=site.axis, dim=last)
    return AllToAll(rows, axis=site.axis, split=site.dim, concat=last)


def _pieced(lookup: Lookup, ids: Value, lost: list[Value]) -> Value:
    """The rows from every piece of the table; each id finds its own in one of them."""
    found = _rows(lookup, 0, ids, lost)
    begin = lookup.rows[0]
    for number in range(1, len(lookup.pieces)):
        start = Constant(values=(begin,), dtype=ids.type.dtype)
        here = Ge(ids, start)
        # ids before the piece become -1; nothing is subtracted from what could be too small
        before = Constant(values=(begin - 1,), dtype=ids.type.dtype)
        own = Sub(Where(here, ids, before), start)
        rows = _rows(lookup, number, own.result, lost)
        found = Where(Unsqueeze(_placed(lookup, here), dims=(-1,)), rows, found).result
        begin += lookup.rows[number]
    return found


def _placed(lookup: Lookup, here: Op) -> Value:
    """Which ids are in a piece, split as the rows are."""
    site = lookup.site
    if lookup.layout == "cyclic" and site.wanted == "scattered":
        return ShardSlice(here, axis=site.axis, dim=site.dim).result
    return here.result


def _rows(lookup: Lookup, number: int, ids: Value, lost: list[Value]) -> Value:
    table = lookup.pieces[number]
    if lookup.layout != "cyclic":
        # a piece gets the ids of all pieces
        inside = lookup.inside and len(lookup.pieces) == 1
        sentinel = lookup.sentinel and not (inside and lookup.layout != "rows")
        result = Embedding(ids, table, inside=inside, sentinel=sentinel).result
        result.name = lookup.site.op.result.name
        return result
    site = lookup.site
    found = CyclicEmbedding(
        ids,
        table,
        rows=lookup.rows[number],
        parts=lookup.ways,
        axis=site.axis,
        scatter=site.dim if site.wanted == "scattered" else -1,
        capacity=lookup.capacity,
        queues=lookup.queues if lookup.capacity else (),
    )
    if lookup.capacity:
        lost.append(found.results[1])
    return found.results[0]


def piece_rows(rows: int, width: DimLike, ways: int, limit: int) -> tuple[int, ...]:
    """The rows of the pieces of a table, of which `ways` ranks share every one: as few as keep
    each below `limit` elements of `width` per rank."""
    if not isinstance(width, int) or not width:
        return (rows,)
    per_rank = max(1, (limit - 1) // width - ROUND)
    most = per_rank * ways
    if rows <= most:
        return (rows,)
    even = -(-rows // -(-rows // most))
    size = -(-even // ways) * ways
    return tuple(min(size, rows - at) for at in range(0, rows, size))
