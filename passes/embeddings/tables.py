"""Tables in another layout: the weight itself if only lookups use it, else a second one."""

from __future__ import annotations

from collections.abc import Iterator

from irc.errors import Error
from irc.ir.core import Module, Op, Value, Weight
from irc.ir.types import Axes, TensorType
from irc.ops.table_rows import with_spare
from irc.weights import Cyclic, Slice, with_shape

from ..shared.edit import free_name
from .schemes import Layout, layout_of, piece_rows

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


def has_other_uses(table: Weight, lookups: list[Op]) -> bool:
    """Whether other operations use a table, such as a tied lm_head."""
    return any(user not in lookups for user in table.users)


class Versions:
    """The weights of one table, per layout, each in pieces of fewer than LIMIT elements a rank.

    `keep` leaves the weight as it is for its other users. The first `hot` rows are a weight of
    their own, which every rank has, where the others are sharded and only lookups use the table.
    """

    def __init__(self, module: Module, table: Weight, axes: Axes, keep: bool, hot: int = 0) -> None:
        self.module, self.table, self.axes, self.keep = module, table, axes, keep
        self.group_size = module.mesh.group_size(axes)
        self.layout = layout_of(table)
        self.shape = table_shape(table)
        self.type = table.type.replicated
        self.ref = with_shape(table.ref, self.type.shape, self.type.dtype)
        self._pieces: dict[Layout, tuple[Weight, ...]] = {}
        self._hot: Weight | None = None
        self._most_hot = 0 if keep or hot >= self.shape[0] else hot

    def hot_rows(self, layout: Layout) -> int:
        """How many rows every rank has besides the pieces of a layout."""
        return 0 if layout == "replicated" else self._most_hot

    def hot(self, layout: Layout) -> Weight | None:
        """The weight of these rows."""
        count = self.hot_rows(layout)
        if not count:
            return None
        if self._hot is None:
            self._hot = self._slice(0, count, "hot")
        return self._hot

    def rows(self, layout: Layout) -> tuple[int, ...]:
        """The rows of every piece of a layout; a table with other users stays in one."""
        if self.keep and layout == self.layout:
            return self.shape[:1]
        rows, width = self.shape
        return _cut(layout, (rows - self.hot_rows(layout), width), self.group_size)

    def pieces(self, layout: Layout) -> tuple[Weight, ...]:
        """The weights of a layout."""
        if layout not in self._pieces:
            self._pieces[layout] = tuple(self._make_pieces(layout))
        return self._pieces[layout]

    def _make_pieces(self, layout: Layout) -> Iterator[Weight]:
        rows, begin = self.rows(layout), self.hot_rows(layout)
        if len(rows) == 1 and not begin and (layout == self.layout or not self.keep):
            if layout != self.layout:
                self._lay_out(self.table, layout)
            yield self.table
            return
        for number, count in enumerate(rows):
            name = layout if len(rows) == 1 else f"{layout}.{number}"
            weight = self._slice(begin, count, name)
            self._lay_out(weight, layout)
            begin += count
            yield weight

    def _slice(self, begin: int, count: int, name: str) -> Weight:
        """A new weight of some rows, which all ranks have."""
        ref = self.ref
        if count < self.shape[0]:
            ref = ref.then(Slice(((begin, begin + count), None)))
        type = self.type.replace(shape=(count, self.shape[1]))
        name = free_name(f"{self.table.name}.{name}", self.module.weights)
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


def _cut(layout: Layout, shape: tuple[int, int], group_size: int) -> tuple[int, ...]:
    rows, width = shape
    if layout == "columns":
        return piece_rows(rows, -(-width // group_size), 1, LIMIT)
    return piece_rows(rows, width, 1 if layout == "replicated" else group_size, LIMIT)


def bytes_per_rank(
    layout: Layout, shape: tuple[int, int], group_size: int, item: int, spare: bool
) -> int:
    """Bytes of a table on one rank, with rows of zeros where `spare`."""
    rows, width = shape
    if layout == "columns":
        width = -(-width // group_size)
    elif layout != "replicated":
        rows = -(-rows // group_size)
    if spare:
        rows = with_spare(rows)
    return rows * width * item
