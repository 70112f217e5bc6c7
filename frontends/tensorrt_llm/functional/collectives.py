"""Collectives over groups of ranks, which are axes of the mesh, and `embedding`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from types import SimpleNamespace
from typing import Any, NamedTuple

from ....ops.table_rows import own_rows
from ... import functional as F
from ...tensor import Tensor as Inner
from ..arithmetic import data, wrapped
from ..context import current_network, current_session
from ..dtypes import dim_resolve_negative
from ..errors import ArgumentError, ScriptError
from ..mapping import Mapping
from ..tensor import Tensor, wrap

_STRATEGIES = {"NCCL": 0, "RING": 0, "ONESHOT": 1, "TWOSHOT": 2, "UB": 3, "AUTO": 4}
AllReduceStrategy = IntEnum("AllReduceStrategy", _STRATEGIES)  # without effect, as the next
AllReduceConfig = IntFlag("AllReduceConfig", "USE_MEMCPY PUSH_MODE")
AllReduceFusionOp = IntEnum(
    "AllReduceFusionOp", "NONE RESIDUAL_RMS_NORM LAST_PROCESS_FOR_UB", start=0
)


@dataclass
class AllReduceFusionParams:
    """What `allreduce` adds and normalizes after the sum over the ranks; it is never changed."""

    fusion_op: AllReduceFusionOp = AllReduceFusionOp.NONE
    bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    eps: float = 1e-6


class AllReduceParams(AllReduceFusionParams):
    """The same, with other positions of the arguments."""


class Group(NamedTuple):
    """Ranks that communicate: their mesh axes, joined by dots ("" for one rank), and how many."""

    axis: str
    size: int


def group_of(ranks: Sequence[int]) -> Group:
    """The group of some ranks of the world, by the session's Mapping."""
    group = list(ranks)
    mapping = current_session().mapping
    if mapping is None and sorted(group) == list(range(len(group))):
        mapping = Mapping(len(group), tp_size=len(group))  # an old script with one group only
    if mapping is None:
        raise ScriptError(
            f"the group {group} needs a Mapping, which says how the world is divided; make a "
            "Mapping(world_size=..., rank=..., tp_size=..., pp_size=...) first"
        )
    return Group(".".join(mapping.axis_of(group)), len(group))


def allreduce(
    tensor: Tensor,
    group: Sequence[int],
    all_reduce_params: AllReduceParams | None = None,
    reduce_fusion_params: AllReduceFusionParams | None = None,
) -> Any:
    """The sum of the tensors [...] of a group, on every rank of it; as the operand.

    With RESIDUAL_RMS_NORM a pair: the normalized sum, and the sum with the residual. The dtype is
    that of the tensor: nccl_plugin changes none.
    """
    over, x = group_of(group), data(tensor)
    params = all_reduce_params or reduce_fusion_params or AllReduceFusionParams()
    op, bias, eps = AllReduceFusionOp(params.fusion_op), params.bias, params.eps
    if op is AllReduceFusionOp.LAST_PROCESS_FOR_UB:
        raise ScriptError(
            "allreduce: LAST_PROCESS_FOR_UB is not supported; use RESIDUAL_RMS_NORM, and quantize "
            "the result by the options of the build"
        )
    fused = op is AllReduceFusionOp.RESIDUAL_RMS_NORM
    if fused and params.residual is None:
        raise ArgumentError("allreduce: RESIDUAL_RMS_NORM needs a residual")
    in_one = fused and bias is None and over.size > 1
    total = x if over.size == 1 or in_one else F.all_reduce(x, over.axis, group_size=over.size)
    total = total if bias is None else total + data(bias)
    if not fused:
        return wrap(total)
    residual, weight = data(params.residual), params.norm_weight
    scale = F.full(1.0, shape=(x.shape[-1],), dtype=x.dtype) if weight is None else data(weight)
    if in_one:
        operands = x, residual, scale
        return wrapped(F.all_reduce_rms_norm(*operands, over.axis, eps=eps, group_size=over.size))
    total = total + residual
    return wrap(F.rms_norm(total, scale, eps=eps)), wrap(total)


def allgather(tensor: Tensor, group: Sequence[int], gather_dim: int = 0) -> Tensor:
    """The tensors [..., n, ...] of a group joined along `gather_dim`, in the order of their ranks:
    [..., size*n, ...]."""
    over, x = group_of(group), data(tensor)
    if over.size == 1:
        return wrap(x)
    (dim,) = dim_resolve_negative(gather_dim, x.ndim)
    return wrap(F.all_gather(x, over.axis, dim, group_size=over.size))


def reduce_scatter(tensor: Tensor, group: Sequence[int]) -> Tensor:
    """Of the sum of the tensors [n, ...] of a group, the block [n/size, ...] whose number is this
    rank's position in the group. n must be a multiple of the size."""
    over, x = group_of(group), data(tensor)
    return wrap(x if over.size == 1 else F.reduce_scatter(x, over.axis, 0, group_size=over.size))


def send(tensor: Tensor, tgt: int) -> Tensor:
    """The tensor itself, which is also sent to rank `tgt` of the next pipeline stage."""
    return current_network().send(tensor, tgt)


def recv(tensor: Tensor, src: int) -> Tensor:
    """What rank `src` of the stage before sends, of the type of the tensor."""
    return current_network().receive(tensor, src)


# -- tables that are replicated, or sharded by rows or columns


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
