"""Writes a lookup by a scheme: the collectives of its ids and rows, and each piece of the table."""

from __future__ import annotations

from dataclasses import dataclass, field

from irc import ops
from irc.ir.core import Op, Value
from irc.ir.mesh import Mesh

from .schemes import Scheme, Site
from .tables import Pieces


@dataclass(frozen=True)
class Lookup:
    """A lookup to write, in a table with the layout of the scheme.

    With `sentinel` rows of zeros may follow the table. A cyclic lookup has `capacity` rows for each
    pair of ranks (0: any number); the capacities that its ids need are appended to `needed`.
    """

    site: Site
    scheme: Scheme
    pieces: Pieces
    mesh: Mesh
    sentinel: bool
    capacity: int
    needed: list[Value] = field(default_factory=list[Value])

    def write(self) -> tuple[Op, Value]:
        """(the operation to replace, its new value as an expression)."""
        site = self.site
        adds = isinstance(site.end, (ops.AllReduce, ops.ReduceScatter))
        if self.scheme.layout == "rows" and adds and self.pieces.hot is None:
            return site.op, self._joined(site.op.ids)  # the end completes the rows as before
        return site.end or site.op, self._followed(self._rows())

    def _rows(self) -> Value:
        """The rows that the ranks need, hot ones included."""
        ids, hot = self.site.ids, self.pieces.hot
        if hot is None:
            return self._cold_rows(ids)
        count = hot.type.shape[0]
        assert isinstance(count, int)
        is_cold, cold_ids = _from_row(ids, count)
        rows = self._cold_rows(cold_ids)
        is_cold = ops.Unsqueeze(self._own(is_cold), dims=(-1,))
        return ops.Where(is_cold, rows, ops.Embedding(self._own(ids), hot)).result

    def _cold_rows(self, ids: Value) -> Value:
        """The rows from the pieces, by the collectives of the scheme."""
        axis, dim, scheme = self.site.axis, self.site.dim, self.scheme
        if scheme.layout == "cyclic":
            return self._joined(ids)
        if scheme.layout == "replicated":
            return self._joined(self._own(ids))
        if scheme.ids:
            ids = ops.AllGather(ids, axis=axis, dim=dim).result
        rows = self._joined(ids)
        last = rows.type.ndim - 1
        match scheme.rows:
            case "all_reduce":
                return ops.AllReduce(rows, axis=axis).result
            case "reduce_scatter":
                return ops.ReduceScatter(rows, axis=axis, dim=dim).result
            case "all_gather":
                return ops.AllGather(rows, axis=axis, dim=last).result
            case _:
                return ops.AllToAll(rows, axis=axis, split=dim, concat=last).result

    def _own(self, value: Value) -> Value:
        """The part of a value per id that belongs to the rows that a rank gets."""
        site = self.site
        if site.wanted == "scattered":
            return ops.ShardSlice(value, axis=site.axis, dim=site.dim).result
        return value

    def _joined(self, ids: Value) -> Value:
        """The rows from every piece of the table; each id is in one of them."""
        rows = self._piece(0, ids)
        begin = self.pieces.rows[0]
        for number in range(1, len(self.pieces.rows)):
            is_here, own_ids = _from_row(ids, begin)
            if self.scheme.layout == "cyclic":
                is_here = self._own(is_here)
            here = ops.Unsqueeze(is_here, dims=(-1,))
            rows = ops.Where(here, self._piece(number, own_ids), rows).result
            begin += self.pieces.rows[number]
        return rows

    def _piece(self, number: int, ids: Value) -> Value:
        """The rows from one piece; zeros for ids of others."""
        site, pieces = self.site, self.pieces
        table = pieces.weights[number]
        if self.scheme.layout != "cyclic":
            # a piece gets the ids of all pieces
            inside = site.op.inside and len(pieces.rows) == 1 and pieces.hot is None
            sentinel = self.sentinel and not (inside and self.scheme.layout != "rows")
            result = ops.Embedding(ids, table, inside=inside, sentinel=sentinel).result
            result.name = site.op.result.name
            return result
        rows, needed = ops.CyclicEmbedding(
            ids,
            table,
            rows=pieces.rows[number],
            parts=self.mesh.group_size(site.axes),
            axis=site.axis,
            scatter=site.dim if site.wanted == "scattered" else -1,
            capacity=self.capacity,
            queues=self._queues() if self.capacity else (),
        ).results
        if self.capacity:
            self.needed.append(needed)
        return rows

    def _queues(self) -> tuple[int, ...]:
        """The number of shards of each dimension of the ids: each has a capacity of its own."""
        site = self.site
        counts = [self.mesh.group_size(axes) for axes in site.ids.type.axes]
        if site.wanted == "scattered":
            counts[site.dim] *= self.mesh.group_size(site.axes)
        return tuple(counts)

    def _followed(self, rows: Value) -> Value:
        """The result of the site from complete rows, by copies of its additive operations."""
        site, source, end = self.site, self.site.op.result, self.site.end
        for op in site.chain:
            rows = op.rebuilt([rows if v is source else v for v in op.operands]).result
            source = op.result
        if isinstance(end, ops.ReduceScatter) and site.wanted == "replicated":
            return ops.ShardSlice(rows, axis=site.axis, dim=end.dim).result
        if end is None and source.type.axes[-1] == site.axes:  # columns, used as they were sharded
            return ops.ShardSlice(rows, axis=site.axis, dim=source.type.ndim - 1).result
        return rows


def _from_row(ids: Value, begin: int) -> tuple[Value, Value]:
    """(which ids are rows from `begin` on, the ids relative to it, -1 for all before)."""
    start = ops.Constant(values=(begin,), dtype=ids.type.dtype)
    here = ops.Ge(ids, start)
    # ids before the piece become -1, since a subtraction could overflow
    before = ops.Constant(values=(begin - 1,), dtype=ids.type.dtype)
    return here.result, ops.Sub(ops.Where(here, ids, before), start).result
