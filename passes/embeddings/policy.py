"""The result of out-of-range ids: zeros, the nearest row, a fixed row, or a counted error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from irc import ops
from irc.errors import Error
from irc.ir.core import Function, Op, Result, Value, Weight
from irc.ir.mesh import Mesh
from irc.ir.result_names import OUT_OF_RANGE, UNKNOWN
from irc.ops.table_rows import LARGEST

from ..shared.edit import named_results, set_results
from .tables import table_of, table_shape

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

    def replaced(self, ids: Value, table: Weight) -> Value:
        """Ids that are all in range of a table, as a new expression; an Error if none can be."""
        rows, op = table_shape(table)[0], ids.producer
        if self.kind == "row" and self.row >= rows:
            raise Error(
                f"out-of-range ids give row {self.row} (row:{self.row}), but @{table.name} has "
                f"{rows} rows"
            )
        if self.kind == "clamp" and not rows:
            raise Error(
                f"out-of-range ids give the nearest row (clamp), but @{table.name} has none"
            )
        if isinstance(op, ops.SlotIds):
            return op.rebuilt([op.ids], outside=self.kind, row=self.row).result
        kind = ids.type.dtype
        if self.kind == "row":
            return ops.Where(
                between(ids, rows), ids, ops.Constant(values=(self.row,), dtype=kind)
            ).result
        # comparisons, as runtimes are known to take the wrong maximum of 64-bit integers
        zero = ops.Constant(values=(0,), dtype=kind)
        least = ops.Where(ops.Ge(ids, zero), ids, zero)
        if rows > LARGEST[kind]:
            return least.result
        last = ops.Constant(values=(rows - 1,), dtype=kind)
        return ops.Where(ops.Lt(least, last), least, last).result


def between(ids: Value, rows: int) -> Op:
    """Which ids are in range of a table of `rows`: bool of the shape of the ids."""
    kind = ids.type.dtype
    low = ops.Ge(ids, ops.Constant(values=(0,), dtype=kind))
    if rows > LARGEST[kind]:
        return low
    return ops.And(low, ops.Lt(ids, ops.Constant(values=(rows,), dtype=kind)))


def add_result(function: Function, name: str, value: Value) -> None:
    """Return one more value, under a name that is not taken."""
    set_results(function, [*function.returned, value], [*named_results(function), Result(name)])


def count_out_of_range(function: Function, lookups: Iterable[ops.Embedding], mesh: Mesh) -> int:
    """Count out-of-range ids, per argument they come from, as results of the function.

    Returns how many results were added.
    """
    counts: dict[str, Value] = {}
    taken = function.result_names()
    for op in lookups:
        name = f"{source_name(function, op.ids)}{OUT_OF_RANGE}"
        if name in taken:
            continue
        count = _count(op, mesh)
        count = ops.Add(counts[name], count) if name in counts else count
        counts[name] = insert_at_end(function, count)
    for name, count in counts.items():
        add_result(function, name, count)
    return len(counts)


def source_name(function: Function, ids: Value) -> str:
    """The argument that ids are computed from, UNKNOWN where it is not a single one."""
    values = {ids}
    pending = [ids]
    while pending:
        op = pending.pop().producer
        new = {*op.operands} - values if op is not None else set[Value]()
        values |= new
        pending += new
    names = [arg.name for arg in function.args if arg in values]
    return names[0] if len(names) == 1 and names[0] is not None else UNKNOWN


def _count(op: ops.Embedding, mesh: Mesh) -> Op:
    """i32[]: how many ids of a lookup are out of range, on all ranks together."""
    ids, gather = op.ids, op.ids.producer
    if gather is not None and gather.opname == "all_gather":
        ids = gather.operands[0]  # every rank counts its own
    inside = between(ids, table_shape(table_of(op.table))[0])
    count: Op = ops.Cast(ops.Not(inside), dtype="i32")
    if ids.type.ndim:
        count = ops.ReduceSum(count, dims=tuple(range(ids.type.ndim)))
    over = tuple(axis for axis in mesh.names if axis in count.result.type.partial)
    return ops.AllReduce(count, axis=".".join(over)) if over else count


def insert_at_end(function: Function, root: Op) -> Value:
    """The result of a new expression, inserted at the end, operands first."""
    for value in root.operands:
        if value.producer is not None and value.producer.parent is None:
            insert_at_end(function, value.producer)
    function.insert(root, function.last)
    return root.result
