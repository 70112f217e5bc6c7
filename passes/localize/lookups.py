"""Local lookups: ids become local row numbers, and a row of zeros for all others."""

from __future__ import annotations

from irc.errors import Error
from irc.ir.core import Op, Value, Weight
from irc.ir.layouts import local_dim
from irc.ops import Embedding
from irc.ops.table_rows import own_rows, with_spare

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
    index = own_rows(
        builder,
        builder.local(op.ids),
        (rows, part),
        group_size,
        lambda dtype: builder.start(axes, part, dtype),
        zeros,
    )
    table = builder.local(op.table)
    return builder.add_all(Embedding(index, table, inside=zeros is not None))
