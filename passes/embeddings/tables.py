"""Tables in another layout: the weight itself where only lookups use it, else a second one."""

from __future__ import annotations

from irc.core import Module, Op, Value, Weight
from irc.errors import Error
from irc.types import Axes, TensorType
from irc.weights import Deal, Slice, pinned

from ..table_rows import with_spare
from .schemes import piece_rows
from .sites import Layout, layout_of

LIMIT = 2**31  # elements that kernels count with 32 bits


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


def shared(table: Weight, lookups: list[Op]) -> bool:
    """Whether anything but these lookups uses a table, such as an lm_head that is tied to it."""
    return any(user not in lookups for user in table.users)


class Versions:
    """The weights of one table, per layout, each in pieces of fewer than LIMIT elements a rank.

    `keep` leaves the weight as it is for its other users.
    """

    def __init__(self, module: Module, table: Weight, axes: Axes, keep: bool) -> None:
        self.module, self.table, self.axes, self.keep = module, table, axes, keep
        self.ways = module.mesh.ways(axes)
        self.layout = layout_of(table)
        self.shape = table_shape(table)
        self.whole = table.type.whole
        self.ref = pinned(table.ref, self.whole.shape, self.whole.dtype)
        self._known: dict[Layout, tuple[Weight, ...]] = {}

    def rows(self, layout: Layout) -> tuple[int, ...]:
        """The rows of every piece of a layout; a table with other users stays in one."""
        if self.keep and layout == self.layout:
            return self.shape[:1]
        return _cut(layout, self.shape, self.ways)

    def pieces(self, layout: Layout) -> tuple[Weight, ...]:
        """The weights of a layout."""
        known = self._known.get(layout)
        if known is None:
            known = self._known[layout] = self._made(layout)
        return known

    def _made(self, layout: Layout) -> tuple[Weight, ...]:
        rows = self.rows(layout)
        if len(rows) == 1:
            return (self._one(layout),)
        found: list[Weight] = []
        begin = 0
        for number, count in enumerate(rows):
            ref = self.ref.then(Slice(((begin, begin + count), None)))
            name = self._name(f"{layout}.{number}")
            weight = Weight(self.whole.replace(shape=(count, self.shape[1])), name, ref)
            found.append(self.module.add_weight(weight))
            self._lay_out(weight, layout)
            begin += count
        return tuple(found)

    def _one(self, layout: Layout) -> Weight:
        if layout == self.layout:
            return self.table
        weight = self.table
        if self.keep:
            weight = self.module.add_weight(Weight(self.whole, self._name(layout), self.ref))
        self._lay_out(weight, layout)
        return weight

    def _lay_out(self, weight: Weight, layout: Layout) -> None:
        whole = weight.type.whole
        rows, width = table_shape(weight)
        if layout == "cyclic":
            weight.ref = pinned(weight.ref, whole.shape, whole.dtype).then(Deal(0, self.ways))
            dealt = -(-rows // self.ways) * self.ways
            weight.type = TensorType(whole.dtype, (dealt, width), (self.axes, ()))
            return
        splits: dict[Layout, tuple[Axes, ...]] = {
            "whole": ((), ()),
            "rows": (self.axes, ()),
            "columns": ((), self.axes),
        }
        weight.type = whole.replace(axes=splits[layout])

    def _name(self, suffix: str) -> str:
        name = f"{self.table.name}.{suffix}"
        while name in self.module.weights:
            name += "_"
        return name


def _cut(layout: Layout, shape: tuple[int, int], ways: int) -> tuple[int, ...]:
    rows, width = shape
    if layout == "columns":
        return piece_rows(rows, -(-width // ways), 1, LIMIT)
    return piece_rows(rows, width, 1 if layout == "whole" else ways, LIMIT)


def rank_bytes(layout: Layout, shape: tuple[int, int], ways: int, item: int, spare: bool) -> int:
    """Bytes of a table on one rank, with rows of zeros behind where `spare`."""
    rows, width = shape
    if layout == "columns":
        width = -(-width // ways)
    elif layout != "whole":
        rows = -(-rows // ways)
    if spare:
        rows = with_spare(rows)
    return rows * width * item
