"""Lookups in a table whose rows are distributed cyclically: row i is on rank i % N."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Module
from ..ir.declare import Operand, operation
from ..ir.types import TensorType
from .collective import OverAxes
from .shapes import index_operand, position

Array: TypeAlias = Any  # a numpy array


@operation("cyclic_embedding")
class CyclicEmbedding(OverAxes):
    """Rows of a table that is distributed cyclically over `axis`, and the capacity that they need.

    ids [...]; an id outside 0 to `rows` - 1 gives zeros. table [N*R@axis, D]: shard r of the N =
    `parts` has the R rows r, r + N, r + 2*N, ..., as the weight step `.cyclic` orders them.
    Results: [..., D], and i32[].

    Ids that are sharded over `axis` go to the ranks that have their rows, which send the rows back:
    the result is sharded alike. Replicated ids give a result that is replicated, or sharded in the
    dimension `scatter`. `capacity` is the number of rows per pair of ranks (0: no limit); ids
    beyond it, in order, give zeros, and the second result is the capacity that all of them need,
    0 where they fit. `queues` has the number of shards of every dimension of the ids, as they are
    sharded and the result is scattered: the capacity holds for each of them. Only in the global
    view.
    """

    ids: Operand
    table: Operand
    rows: int
    parts: int
    axis: str
    scatter: int = -1
    capacity: int = 0
    queues: tuple[int, ...] = ()

    @property
    def split(self) -> int | None:
        """The dimension of the ids that is sharded over the axis."""
        over = [i for i, axes in enumerate(self.ids.type.axes) if axes == self.axes]
        return over[0] if over else None

    def infer(self) -> tuple[TensorType, ...]:
        ids, table = index_operand(self.opname, self.ids), self.table.type
        self._check_table(table)
        self._check_ids(ids)
        groups = list(ids.axes)
        if self.scatter >= 0:
            at = position(self.opname, self.scatter, ids.ndim)
            if self.split is not None:
                raise Error(
                    f"cyclic_embedding: the ids are {ids}, whose result is sharded already; leave "
                    "scatter out"
                )
            groups[at] += self.axes
        rows = TensorType(table.dtype, (*ids.shape, table.shape[1]), (*groups, ()))
        return rows, TensorType("i32", ())

    def _check_table(self, table: TensorType) -> None:
        size = self.parts * -(-self.rows // max(1, self.parts))
        if table.ndim != 2 or self.parts < 1 or table.shape[0] != size:
            raise Error(
                f"cyclic_embedding: {self.rows} rows in {self.parts} parts are a table [{size}, "
                f"width], not {table}"
            )
        if table.axes != (self.axes, ()) or table.partial:
            raise Error(
                f"cyclic_embedding over {self.axis}: the table is {table}, but its rows must be "
                "sharded over it"
            )

    def _check_ids(self, ids: TensorType) -> None:
        used = {axis for axes in ids.axes for axis in axes if axes != self.axes}
        if ids.partial or used & set(self.axes):
            raise Error(
                f"cyclic_embedding over {self.axis}: the ids are {ids}; one dimension is sharded "
                "over it, or none"
            )
        if self.capacity < 0:
            raise Error("cyclic_embedding: capacity cannot be negative; 0 is no limit")
        if self.queues and (len(self.queues) != ids.ndim or min(self.queues) < 1):
            raise Error(
                f"cyclic_embedding: queues is {list(self.queues)}, but {ids} needs a number of "
                "shards for each of its dimensions"
            )

    def verify(self, module: Module) -> None:
        """The mesh has the axes, `queues` are the shards of the ids, the view is global."""
        if module.local:
            raise Error("cyclic_embedding is for the global view only; localize lowers it")
        if module.mesh.group_size(self.axes) != self.parts:
            raise Error(
                f"cyclic_embedding has {self.parts} parts, but the mesh ({module.mesh}) has "
                f"{module.mesh.group_size(self.axes)} ranks over {self.axis}"
            )
        groups = self.results[0].type.axes[: self.ids.type.ndim]
        wanted = tuple(map(module.mesh.group_size, groups))
        if self.capacity and (self.queues or (1,) * len(wanted)) != wanted:
            raise Error(
                f"cyclic_embedding has queues={list(self.queues)}, but over the mesh "
                f"({module.mesh}) its ids have the shards {list(wanted)}"
            )

    def evaluate(self, ids: Array, table: Array) -> tuple[Array, Array]:
        in_range = (ids >= 0) & (ids < self.rows)
        some = np.where(in_range, ids, 0)
        owner, row = some % self.parts, some // self.parts
        fits, needed = in_range.copy(), 0
        for place in self._blocks(ids.shape) if self.capacity else ():
            here = owner[place].reshape(-1, 1) == range(self.parts)
            mine = in_range[place].reshape(-1, 1) & here
            slot = np.sum(mine * (np.cumsum(mine, axis=0) - 1), axis=1)
            fits[place] &= (slot < self.capacity).reshape(fits[place].shape)
            needed = max(needed, int(np.sum(mine, axis=0).max()))
        rows = np.zeros((*ids.shape, table.shape[1]), table.dtype)
        rows[fits] = table[(owner * (len(table) // self.parts) + row)[fits]]
        return rows, np.int32(needed if needed > self.capacity else 0)

    def _blocks(self, shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
        counts = self.queues or (1,) * len(shape)
        sizes = [-(-n // count) for n, count in zip(shape, counts, strict=True)]
        for place in np.ndindex(*counts):
            yield tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, sizes, strict=True))
