"""Rows of embedding tables: ids as row numbers of a rank, and rows of zeros behind a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..ir.core import Op, Value
from .elementwise import Add, Sub
from .logic import And, Cast, Ge, Lt, Where

ROUND = 8  # rows of a table with zeros behind are a multiple of this
LARGEST = {"i32": 2**31 - 1, "i64": 2**63 - 1}  # what an id of a dtype can be at most


class Appender(Protocol):
    """Appends operations to a function in the local view."""

    def add(self, op: Op, /) -> Value: ...
    def constant(self, value: float, dtype: str, /) -> Value: ...


def with_spare(rows: int) -> int:
    """The rows of a table with 1 to ROUND rows of zeros behind."""
    return -(-(rows + 1) // ROUND) * ROUND


def own_rows(
    to: Appender,
    ids: Value,
    sizes: tuple[int, int],
    group_size: int,
    first: Callable[[str], Value],
    zeros: int | None = None,
) -> Value:
    """Ids [...] as row numbers of this rank, and `zeros` (-1 without it) for all others.

    `sizes` are the rows of all ranks and of one; `first` makes the number of the first row of this
    rank, in a dtype. No intermediate number overflows its dtype, whatever the ids are; i32 wherever
    that holds the rows of a rank.
    """
    rows, part = sizes
    other = -1 if zeros is None else zeros
    kind = ids.type.dtype
    if (part + ROUND) * group_size > LARGEST[kind]:
        kind, ids = "i64", to.add(Cast(ids, dtype="i64"))
    if group_size == 1:
        low, high, none = (to.constant(n, kind) for n in (0, rows, other))
        own = to.add(Where(_between(to, ids, low, high), ids, none))
    else:
        start = first(kind)
        end = to.add(Add(start, to.constant(part, kind)))
        if rows < part * group_size:  # the last ranks have less
            last = to.constant(rows, kind)
            end = to.add(Where(Lt(end, last), end, last))
        none = to.add(Add(start, to.constant(other, kind)))
        own = to.add(Sub(Where(_between(to, ids, start, end), ids, none), start))
    if kind == "i64" and part + ROUND <= LARGEST["i32"]:
        own = to.add(Cast(own, dtype="i32"))
    return own


def _between(to: Appender, ids: Value, low: Value, high: Value) -> Value:
    return to.add(And(Ge(ids, low), Lt(ids, high)))
