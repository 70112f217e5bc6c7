"""Tables in another layout: the weight itself if only lookups use it, else a second one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from irc.errors import Error
from irc.ir.core import Module, Value, Weight
from irc.ir.types import TensorType
from irc.ops.table_rows import ROUND, with_spare
from irc.weights import Cyclic, Slice, with_shape

from ..shared.edit import free_name
from .schemes import Layout, Site, layout_of

LIMIT = 2**31  # elements that a 32-bit index reaches


def table_of(value: Value) -> Weight:
    """The weight that a lookup reads."""
    assert isinstance(value, Weight)
    return value


def table_shape(table: Weight) -> tuple[int, int]:
    """[V, D]; an Error where a size is no number."""
    rows, width = table.type.shape
    if not isinstance(rows, int) or not isinstance(width, int):
        raise Error(f"@{table.name} is {table.type}; the sizes of a weight are numbers")
    return rows, width


@dataclass(frozen=True)
class Pieces:
    """A table in one layout: its pieces, the rows of each, and `hot`, the rows in front of them
    that every rank has."""

    weights: tuple[Weight, ...]
    rows: tuple[int, ...]
    hot: Weight | None = None


class Table:
    """A table of some lookups, in any layout, in pieces of fewer than LIMIT elements a rank.

    A `tied` one has other uses, such as an lm_head, and stays as it is for them. The first `hot`
    rows are a weight of their own, which every rank has, where the others are sharded and only
    lookups use the table.
    """

    def __init__(self, module: Module, sites: Sequence[Site], hot: int) -> None:
        self.module, self.weight, self.axes = module, sites[0].table, sites[0].axes
        lookups = [site.op for site in sites]
        self.tied = any(user not in lookups for user in self.weight.users)
        self.group_size = module.mesh.group_size(self.axes)
        self.layout: Layout = layout_of(self.weight)
        self.shape = table_shape(self.weight)
        self._hot = 0 if self.tied or hot >= self.shape[0] else hot

    def hot_rows(self, layout: Layout) -> int:
        """How many rows every rank has besides the pieces of a layout."""
        return 0 if layout == "replicated" else self._hot

    def about_hot_rows(self, layout: Layout) -> str:
        """A sentence about the rows that every rank has."""
        if count := self.hot_rows(layout):
            return f"@{self.weight.name}: its first {count} rows are on every rank"
        why = "it has other uses" if self.tied else f"it has {self.shape[0]} rows"
        return f"@{self.weight.name}: hot has no effect, because {why}"

    def rows(self, layout: Layout) -> tuple[int, ...]:
        """The rows of every piece of a layout; a table with other users stays in one."""
        if self.tied and layout == self.layout:
            return self.shape[:1]
        rows, width = self.shape[0] - self.hot_rows(layout), self.shape[1]
        sharing = self.group_size if layout in ("rows", "cyclic") else 1
        if layout == "columns":
            width = -(-width // self.group_size)
        most = max(1, (LIMIT - 1) // max(1, width) - ROUND) * sharing
        if rows <= most or not width:
            return (rows,)
        even = -(-rows // -(-rows // most))
        size = -(-even // sharing) * sharing
        return tuple(min(size, rows - at) for at in range(0, rows, size))

    def pieces(self, layout: Layout) -> Pieces:
        """The weights of a layout, which are added to the module."""
        rows, hot = self.rows(layout), self.hot_rows(layout)
        if len(rows) == 1 and not hot and (layout == self.layout or not self.tied):
            if layout != self.layout:
                self._lay_out(self.weight, layout)
            return Pieces((self.weight,), rows)
        slices = tuple(self._slices(layout))
        return Pieces(slices[1:] if hot else slices, rows, slices[0] if hot else None)

    def _slices(self, layout: Layout) -> Iterator[Weight]:
        """New weights: the hot rows, if there are some, then the pieces."""
        begin, rows = self.hot_rows(layout), self.rows(layout)
        if begin:
            yield self._slice(0, begin, "hot")
        for number, count in enumerate(rows):
            name = layout if len(rows) == 1 else f"{layout}.{number}"
            weight = self._slice(begin, count, name)
            self._lay_out(weight, layout)
            begin += count
            yield weight

    def _slice(self, begin: int, count: int, name: str) -> Weight:
        """A new weight of some rows, which all ranks have."""
        type = self.weight.type.replicated
        ref = with_shape(self.weight.ref, type.shape, type.dtype)
        if count < self.shape[0]:
            ref = ref.then(Slice(((begin, begin + count), None)))
        type = type.replace(shape=(count, self.shape[1]))
        name = free_name(f"{self.weight.name}.{name}", self.module.weights)
        return self.module.add_weight(Weight(type, name, ref))

    def _lay_out(self, weight: Weight, layout: Layout) -> None:
        type = weight.type.replicated
        rows, width = table_shape(weight)
        axes = {"rows": (self.axes, ()), "columns": ((), self.axes)}.get(layout, ((), ()))
        if layout == "cyclic":
            steps = Cyclic(0, self.group_size)
            weight.ref = with_shape(weight.ref, type.shape, type.dtype).then(steps)
            rows, axes = -(-rows // self.group_size) * self.group_size, (self.axes, ())
        weight.type = TensorType(type.dtype, (rows, width), axes)

    def elements_per_rank(self, layout: Layout, spare: bool) -> int:
        """Elements of the table on one rank, with rows of zeros where `spare`."""
        hot = self.hot_rows(layout)
        rows, width = self.shape[0] - hot, self.shape[1]
        if layout == "columns":
            width = -(-width // self.group_size)
        elif layout != "replicated":
            rows = -(-rows // self.group_size)
        return (with_spare(rows) if spare else rows) * width + hot * self.shape[1]
