"""Lookups in sharded tables: their ids, and the ranks that need their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from irc.ir.core import Op, Value, Weight
from irc.ir.types import Axes
from irc.ops import AllGather, AllReduce, AllToAll, Call, Embedding, ReduceScatter
from irc.ops.collective import Exchange

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
        """How the table is sharded now."""
        return layout_of(self.table)


def layout_of(table: Weight) -> Layout:
    """How a table [V, D] is sharded."""
    rows, columns = table.type.axes
    return "rows" if rows else "columns" if columns else "replicated"


def find_site(op: Embedding, axes: Axes | None, other: bool = False) -> Site | str:
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
    if isinstance(gather, AllGather) and gather.axes == (rows or columns):
        rank = gather.x.type.ndim
        if gather.dim % rank == dim and gather.x.type.axes[dim] == gather.axes:
            return Site(op, table, gather.axes, gather.x, "sharded", dim, chain, end)
    return Site(op, table, rows or columns, op.ids, "scattered", dim, chain, end)


def _replicated(op: Embedding, table: Weight, axes: Axes) -> Site | str:
    """A site whose result is replicated, or sharded as its ids are."""
    for dim, over in enumerate(op.ids.type.axes):
        if over == axes:
            return Site(op, table, axes, op.ids, "sharded", dim)
        if set(over) & set(axes):
            return f"its ids are {op.ids.type}"
    return Site(op, table, axes, op.ids, "replicated")


Walk: TypeAlias = tuple[tuple[Op, ...], Op, int | None]


def _walk_sum(op: Embedding, axes: Axes) -> Walk | str:
    """(additive operations, the collective that completes the sum, the dimension it scatters)."""
    chain: list[Op] = []
    value = op.result
    while True:
        user = only_user(value)
        if user is None:
            return "its partial sum is used in several places"
        if isinstance(user, AllReduce) and user.axes == axes:
            return tuple(chain), user, None
        if isinstance(user, ReduceScatter) and user.axes == axes:
            return tuple(chain), user, user.dim % value.type.ndim
        if not _is_additive(user, value, axes):
            return f"its partial sum is an operand of {user.opname}"
        chain.append(user)
        value = user.results[0]


def _walk_columns(op: Embedding, axes: Axes) -> Walk | str:
    """The same for columns, which an all_gather or an all_to_all joins."""
    user, last = only_user(op.result), op.result.type.ndim - 1
    if user is None:
        return "its columns are used in several places"
    if isinstance(user, AllGather) and user.axes == axes and user.dim % (last + 1) == last:
        return (), user, None
    if isinstance(user, AllToAll) and user.axes == axes and user.concat % (last + 1) == last:
        return (), user, user.split % (last + 1)
    return f"{user.opname} takes its columns as they are sharded"


def _is_additive(op: Op, value: Value, axes: Axes) -> bool:
    """Whether the sum of an operation's results over the ranks is its result for their sum."""
    if len(op.results) != 1 or isinstance(op, (Exchange, Call)):
        return False
    others = [v for v in op.operands if v is not value]
    waits = set(axes) <= set(op.result.type.partial)
    return waits and not any(set(axes) & set(v.type.partial) for v in others)
