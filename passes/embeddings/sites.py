"""Lookups in tables that the ranks share: what each gets, and where its result has to be."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from irc.core import Op, Value, Weight
from irc.ops import AllGather, AllReduce, AllToAll, Embedding, ReduceScatter
from irc.types import Axes

from ..edit import only_user

Wanted: TypeAlias = Literal["all", "scattered", "split"]
Layout: TypeAlias = Literal["whole", "rows", "columns", "cyclic"]
UNSPLIT = "its table is not split"


@dataclass(frozen=True)
class Site:
    """One lookup whose table is split over `axes`, or is to be.

    `ids` are those that a rank has before any are gathered. `all` of the result is wanted on every
    rank; `scattered`, split in `dim` though the ids are whole; or `split` in `dim` as the ids are.
    `chain` are additive operations on the way to `end`, the collective that finishes the result.
    """

    op: Embedding
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
        """How the table is split now."""
        return layout_of(self.table)


def layout_of(table: Weight) -> Layout:
    """How a table [V, D] is split."""
    rows, columns = table.type.axes
    return "rows" if rows else "columns" if columns else "whole"


def find_site(op: Embedding, axes: Axes | None) -> Site | str:
    """The site of a lookup, or why it stays as it is. `axes` are for a table that is not split."""
    table = op.table
    assert isinstance(table, Weight)
    rows, columns = table.type.axes
    if rows and columns:
        return "its rows and its columns are split"
    if not rows and not columns:
        return _unsplit(op, table, axes) if axes else UNSPLIT
    walked = _walk_sum(op, rows) if rows else _walk_columns(op, columns)
    if isinstance(walked, str):
        return walked
    chain, end, dim = walked
    if dim is None:
        return Site(op, table, rows or columns, op.ids, "all", 0, chain, end)
    if dim >= op.ids.type.rank:
        return "its result is split in the columns of the table"
    gather = op.ids.producer
    if isinstance(gather, AllGather) and gather.axes == (rows or columns):
        rank = gather.x.type.rank
        if gather.dim % rank == dim and gather.x.type.axes[dim] == gather.axes:
            return Site(op, table, gather.axes, gather.x, "split", dim, chain, end)
    return Site(op, table, rows or columns, op.ids, "scattered", dim, chain, end)


def _unsplit(op: Embedding, table: Weight, axes: Axes) -> Site | str:
    """A site whose result is whole, or split as its ids are."""
    for dim, over in enumerate(op.ids.type.axes):
        if over == axes:
            return Site(op, table, axes, op.ids, "split", dim)
        if set(over) & set(axes):
            return f"its ids are {op.ids.type}"
    return Site(op, table, axes, op.ids, "all")


Walk: TypeAlias = tuple[tuple[Op, ...], Op, int | None]


def _walk_sum(op: Embedding, axes: Axes) -> Walk | str:
    """(additive operations, the collective that finishes the sum, the dimension it scatters)."""
    chain: list[Op] = []
    value = op.result
    while True:
        user = only_user(value)
        if user is None:
            return "its pending sum is used in several places"
        if isinstance(user, AllReduce) and user.axes == axes:
            return tuple(chain), user, None
        if isinstance(user, ReduceScatter) and user.axes == axes:
            return tuple(chain), user, user.dim % value.type.rank
        if not _scales(user, value):
            return f"its pending sum goes into {user.opname}"
        chain.append(user)
        value = user.results[0]


def _walk_columns(op: Embedding, axes: Axes) -> Walk | str:
    """The same for columns, which an all_gather or an all_to_all joins."""
    user, last = only_user(op.result), op.result.type.rank - 1
    if user is None:
        return "its columns are used in several places"
    if isinstance(user, AllGather) and user.axes == axes and user.dim % (last + 1) == last:
        return (), user, None
    if isinstance(user, AllToAll) and user.axes == axes and user.concat % (last + 1) == last:
        return (), user, user.split % (last + 1)
    return f"{user.opname} takes its columns as they are split"


def _scales(op: Op, value: Value) -> bool:
    """Whether an operation works on the elements of `value` one by one, with single numbers."""
    if len(op.results) != 1 or op.result.type is not value.type:
        return False
    others = [v for v in op.operands if v is not value]
    return all(not v.type.sharded and _has_one_element(v) for v in others)


def _has_one_element(value: Value) -> bool:
    """Whether a value has one element."""
    sizes = [size for size in value.type.shape if isinstance(size, int)]
    return len(sizes) == value.type.rank and prod(sizes) == 1
