"""The result of out-of-range ids: zeros, the nearest row, a fixed row, or a counted error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from irc.errors import Error
from irc.ir.core import Op, Value
from irc.ops import And, Constant, Ge, Lt, SlotIds, Where
from irc.ops.table_rows import LARGEST

Kind: TypeAlias = Literal["zero", "clamp", "row", "error"]


@dataclass(frozen=True)
class Policy:
    """The result of an out-of-range id; `row` is for `kind` "row"."""

    kind: Kind = "zero"
    row: int = 0

    @staticmethod
    def parse(text: str, option: str = "policy") -> Policy:
        """A policy from `zero`, `clamp`, `row:3` or `error`; `option` is the name for messages."""
        match = re.fullmatch(r"(zero|clamp|error)|row:(\d{1,18})", text)
        if match is None:
            raise Error(
                f"{option} is {text!r}, but it must be zero, clamp, error, or row:N for the row N"
            )
        return Policy("row", int(match[2])) if match[2] else Policy(cast("Kind", text))

    @property
    def moves(self) -> bool:
        """Whether out-of-range ids are replaced by ids in range."""
        return self.kind in ("clamp", "row")

    def kept_inside(self, ids: Value, rows: int, name: str) -> Value:
        """Ids that are all in range of a table of `rows`, as a new expression."""
        self.check(rows, name)
        op = ids.producer
        if isinstance(op, SlotIds):
            return op.rebuilt([op.ids], outside=self.kind, row=self.row).result
        kind = ids.type.dtype
        if self.kind == "row":
            return Where(between(ids, rows), ids, Constant(values=(self.row,), dtype=kind)).result
        # comparisons, as runtimes are known to take the wrong maximum of 64-bit integers
        zero = Constant(values=(0,), dtype=kind)
        least = Where(Ge(ids, zero), ids, zero)
        if rows > LARGEST[kind]:
            return least.result
        last = Constant(values=(rows - 1,), dtype=kind)
        return Where(Lt(least, last), least, last).result

    def check(self, rows: int, name: str) -> None:
        """An Error where the fixed row is no row of the table."""
        if self.kind == "row" and self.row >= rows:
            raise Error(
                f"out-of-range ids give row {self.row} (row:{self.row}), but @{name} has "
                f"{rows} rows"
            )
        if self.kind == "clamp" and not rows:
            raise Error(f"out-of-range ids give the nearest row (clamp), but @{name} has none")


def between(ids: Value, rows: int) -> Op:
    """Which ids are in range of a table of `rows`: bool of the shape of the ids."""
    kind = ids.type.dtype
    low = Ge(ids, Constant(values=(0,), dtype=kind))
    if rows > LARGEST[kind]:
        return low
    return And(low, Lt(ids, Constant(values=(rows,), dtype=kind)))
