"""Ids of several slots as ids of one table, in which the rows of the slots follow each other."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal

import numpy as np

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import Operand, operation
from .control import LARGEST_CONSTANT, Constant, Full
from .elementwise import Add
from .logic import And, Ge, Lt, Where
from .parts import Concat
from .shape import Reshape
from .shapes import AlongDim, index_operand, position, shape_text


@operation("slot_ids")
class SlotIds(AlongDim):
    """ids [B, slots, ...] + the number of rows of the slots before, each with a bound of its own.

    Slot s along `dim` has `sizes[s]` rows. An out-of-range id becomes -1 (`outside` is zero or
    error), the nearest id of its slot (clamp), or the slot's row `row` (row).
    """

    ids: Operand
    sizes: tuple[int, ...]
    dim: int = 1
    outside: Literal["zero", "clamp", "row", "error"] = "zero"
    row: int = 0

    def expand(self) -> Op:
        ids = index_operand(self.opname, self.ids)
        at = position(self.opname, self.dim, ids.ndim)
        if ids.shape[at] != len(self.sizes):
            raise Error(
                f"slot_ids: there are {len(self.sizes)} sizes for the slots of "
                f"{shape_text(ids.shape)} along dimension {at}"
            )
        if min(self.sizes, default=1) < 1:
            raise Error("slot_ids: a slot has at least 1 row")
        if self.outside == "row" and not 0 <= self.row < min(self.sizes, default=1):
            raise Error(f"slot_ids: some slot has no row {self.row}")
        if ids.dtype == "i32" and sum(self.sizes) > 2**31 - 1:
            raise Error(f"slot_ids: {sum(self.sizes)} rows need ids in i64; cast them before")
        return self._expanded(ids.dtype, at, ids.ndim)

    def _expanded(self, kind: str, at: int, rank: int) -> Op:
        shape = tuple(len(self.sizes) if i == at else 1 for i in range(rank))
        sizes = Reshape(_numbers(self.sizes, kind), shape=shape)
        before = Reshape(_numbers(_offsets(self.sizes), kind), shape=shape)
        zero = _number(0, kind)
        if self.outside == "clamp":
            # comparisons, as runtimes are known to take the wrong maximum of 64-bit integers
            least, last = Where(Ge(self.ids, zero), self.ids, zero), Add(sizes, _number(-1, kind))
            return Add(Where(Lt(least, last), least, last), before)
        in_range = And(Ge(self.ids, zero), Lt(self.ids, sizes))
        some = Where(in_range, self.ids, _number(self.row, kind))
        if self.outside == "row":
            return Add(some, before)
        return Where(in_range, Add(some, before), _number(-1, kind))

    def evaluate(self, ids: Any) -> Any:
        shape = [-1 if i == self.dim % ids.ndim else 1 for i in range(ids.ndim)]
        sizes = np.array(self.sizes, ids.dtype).reshape(shape)
        before = np.array(_offsets(self.sizes), ids.dtype).reshape(shape)
        if self.outside == "clamp":
            return np.clip(ids, 0, sizes - 1) + before
        in_range = (ids >= 0) & (ids < sizes)
        if self.outside == "row":
            return np.where(in_range, ids, self.row) + before
        return np.where(in_range, np.where(in_range, ids, 0) + before, -1)


def _offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(sizes[:-1], initial=0)) if sizes else ()


def _number(value: int, kind: str) -> Op:
    return Full(value=value, dtype=kind)


def _numbers(values: tuple[int, ...], kind: str) -> Op | Value:
    """A constant of any length, put together from short ones."""
    if len(set(values)) <= 1:
        return Full(value=values[0] if values else 0, shape=(len(values),), dtype=kind)
    step = LARGEST_CONSTANT
    cuts = [values[i : i + step] for i in range(0, len(values), step)]
    pieces = [Constant(values=cut, shape=(len(cut),), dtype=kind) for cut in cuts]
    return pieces[0] if len(pieces) == 1 else Concat(pieces, dim=0)
