"""Local lookups: ids become local row numbers, and a row of zeros for all others."""

from __future__ import annotations

from irc.errors import Error
from irc.ir.core import Op, Value, Weight
from irc.ir.layouts import local_dim
from irc.ir.types import Axes
from irc.ops import Add, And, Cast, Embedding, Ge, Lt, Sub, Where

from ..shared.table_rows import LARGEST, ROUND, with_spare
from .builder import Builder
from .by_rule import local_operation


def spare_rows(weight: Weight, rows: int) -> int:
    """The rows of zeros behind the `rows` that a rank has of a table.

    0 where the weight has other uses than lookups that request them.
    """
    asking = [op for op in weight.users if _asks(op, weight)]
    if not asking or len(asking) != len(weight.users):
        return 0
    return with_spare(rows) - rows


def _asks(op: Op, weight: Weight) -> bool:
    wanted = op.opname == "cyclic_embedding" or op.attributes.get("sentinel") is True
    return wanted and op.operands.index(weight) == 1


def embedding(builder: Builder, op: Op) -> tuple[Value, ...]:
    """Ids relative to the first row of this rank; all others give zeros."""
    assert isinstance(op, Embedding)
    type = builder.type(op.table)
    axes, zeros = type.axes[0], builder.zeros.get(op.table)
    group_size = builder.mesh.group_size(axes)
    if group_size == 1 and (zeros is None or op.inside):
        return local_operation(builder, op)
    rows = type.shape[0]
    if not isinstance(rows, int):
        raise Error(f"the table is {type}; a sharded table has a number of rows, not a symbol")
    part = local_dim(rows, group_size)
    assert isinstance(part, int)
    index = own_rows(builder, builder.local(op.ids), axes, (rows, part), zeros)
    table = builder.local(op.table)
    return builder.add_all(Embedding(index, table, inside=zeros is not None))


def own_rows(
    builder: Builder, ids: Value, axes: Axes, sizes: tuple[int, int], zeros: int | None
) -> Value:
    """Ids [...] as row numbers of this rank, and `zeros` (-1 without it) for all others.

    `sizes` are the rows of all ranks and of one. No intermediate number overflows its dtype,
    whatever the ids are; i32 wherever that holds the rows of a rank.
    """
    rows, part = sizes
    other = -1 if zeros is None else zeros
    group_size = builder.mesh.group_size(axes)
    kind = ids.type.dtype
    if (part + ROUND) * group_size > LARGEST[kind]:
        kind, ids = "i64", builder.add(Cast(ids, dtype="i64"))
    if group_size == 1:
        low, high, none = (builder.constant(n, kind) for n in (0, rows, other))
        own = builder.add(Where(_between(builder, ids, low, high), ids, none))
    else:
        start = builder.start(axes, part, kind)
        end = builder.add(Add(start, builder.constant(part, kind)))
        if rows % group_size:  # the last ranks have less
            last = builder.constant(rows, kind)
            end = builder.add(Where(Lt(end, last), end, last))
        none = Add(start, builder.constant(other, kind))
        builder.add(none)
        own = builder.add(Sub(Where(_between(builder, ids, start, end), ids, none), start))
    if kind == "i64" and part + ROUND <= LARGEST["i32"]:
        own = builder.add(Cast(own, dtype="i32"))
    return own


def _between(builder: Builder, ids: Value, low: Value, high: Value) -> Value:
    return builder.add(And(Ge(ids, low), Lt(ids, high)))
