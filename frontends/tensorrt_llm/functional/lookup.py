"""`embedding`: lookup in a table that is replicated, or sharded by rows or columns."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ....ops.table_rows import own_rows
from ... import functional as F
from ...tensor import Tensor as Inner
from ..arithmetic import data
from ..context import current_network
from ..errors import ArgumentError, ScriptError
from ..tensor import Tensor, wrap
from .collectives import allgather, allreduce


def embedding(
    input: Tensor,
    weight: Tensor,
    tp_size: int = 1,
    tp_group: Sequence[int] | None = None,
    sharding_dim: int = 0,
    tp_rank: int | None = None,
    per_token_scale: Tensor | None = None,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """Rows of a table for ids i32|i64 [...]: [..., H] on every rank, zeros for other ids.

    weight [V, H], or with tp_size > 1 and a tp_group one rank's shard: rows from tp_rank * V on
    [V, H] if sharding_dim is 0, columns [V, H/tp_size] if it is 1. An id below 0 or beyond all rows
    gives zeros, whatever tp_size is. `vocab_size` are the rows of all ranks without padding.
    `per_token_scale` has a factor per row of an i8 weight: of this rank's rows, or of all.
    """
    ids, table = data(input), data(weight)
    if table.ndim != 2:
        raise ScriptError(f"embedding: expected a weight [rows, width], found {table.type}")
    scale = None if per_token_scale is None else data(per_token_scale)
    if tp_size == 1 or tp_group is None:
        return wrap(_rows(ids, ids, table, scale))
    if len(tp_group) != tp_size:
        raise ArgumentError(
            f"embedding: expected a tp_group of tp_size={tp_size} ranks, found {list(tp_group)}"
        )
    if sharding_dim == 1:
        return allgather(wrap(_rows(ids, ids, table, scale)), tp_group, gather_dim=-1)
    if sharding_dim != 0:
        raise ArgumentError(
            "embedding: expected sharding_dim 0 (rows: the vocabulary) or 1 (columns: the hidden "
            f"size), found {sharding_dim}"
        )
    own = _own_rows(ids, table, tp_group, tp_rank, vocab_size)
    return allreduce(wrap(_rows(ids, own, table, scale)), tp_group)


def _rows(ids: Inner, own: Inner, table: Inner, scale: Inner | None) -> Inner:
    """Rows of a table by their numbers in it, `own`, each times its factor."""
    if scale is None:
        return F.embedding(own, table)
    # Some engines have no zeros of i8: codes are looked up in range, and their products masked.
    rows: Any = table.shape[0]
    first, last = (F.full(n, dtype=own.dtype) for n in (0, rows - 1))
    is_row = F.and_(F.ge(own, first), F.le(own, last))
    codes = F.embedding(F.where(is_row, own, first), table, inside=True)
    factors = scale.reshape(-1, 1)
    count = factors.shape[0]
    if isinstance(rows, int) and isinstance(count, int) and count < rows:
        raise ArgumentError(
            f"embedding: expected a per_token_scale of the {rows} rows of the weight, or of all "
            f"ranks' rows, found {scale.type}"
        )
    scaled = codes.cast(scale.dtype) * F.embedding(own if count == rows else ids, factors)
    return F.where(is_row.unsqueeze(-1), scaled, F.full(0.0, dtype=scale.dtype))


def _own_rows(
    ids: Inner, table: Inner, group: Sequence[int], tp_rank: int | None, vocab_size: int | None
) -> Inner:
    """ids as row numbers of this rank's shard, -1 for those of other ranks."""
    if tp_rank is None:
        raise ArgumentError(
            "embedding: a table sharded by rows (sharding_dim=0) needs tp_rank, found None; give "
            "mapping.tp_rank"
        )
    size, part = len(group), table.shape[0]
    if not isinstance(part, int) or not 0 <= tp_rank < size:
        raise ArgumentError(
            f"embedding: expected a table with a number of rows and a tp_rank from 0 to {size - 1},"
            f" found {table.type} and {tp_rank}"
        )
    network = current_network()
    to: Any = SimpleNamespace(add=network.builder.value, constant=network.builder.number)
    rows = part * size if vocab_size is None else vocab_size
    begin = tp_rank * part  # differs by rank, which `merge` makes an operation
    own = own_rows(to, ids.value, (rows, part), size, lambda kind: to.constant(begin, kind))
    return Inner(own, network.tracer)
