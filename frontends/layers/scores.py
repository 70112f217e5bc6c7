"""`attend`: attention with every kind of mask and bias, in terms of the operation `attention`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce

from ...errors import Error
from ...ir.dims import exact_divide
from .. import functional as F
from ..tensor import Tensor
from .masks import BlockSparse, chunk_mask, prefix_mask, window_mask
from .positions import RelativePositions, alibi_bias, query_positions, size_tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int,
    *,
    past: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: int | Tensor = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    relative: RelativePositions | None = None,
    table: Tensor | None = None,
    prefix: Tensor | None = None,
    block_sparse: BlockSparse | None = None,
    chunk: int = 0,
    heads: int = 0,
    first: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scores) v for q [B, S, H*head_dim]; operands and options as of `F.attention`.

    `slopes` f32 [H] are those of ALiBi. `relative` adds biases from `table` [H, buckets]; without
    it `table` [H, N, N] is the bias of query position i and key j. `prefix` i32 [B|1] keys are
    visible to all queries, later ones causally. `window` may be an i32 [1]. For `block_sparse`,
    q has the heads `first`, `first` + 1, ... of `heads`. `chunk` is as of `chunk_mask`.
    """
    keys = k.shape[2 if k.ndim == 4 else 1]

    @cache
    def queries() -> Tensor:
        if past is not None or keys == q.shape[1]:
            return query_positions(q.shape[1], 0 if past is None else past)
        # the last query is at the last key, also where there are fewer keys
        return query_positions(q.shape[1]) + (size_tensor(keys) - size_tensor(q.shape[1]))

    local = head_count(q, head_dim)
    if chunk:
        mask = _joined(F.and_, mask, chunk_mask(queries(), keys, chunk))
    masks: list[Tensor] = []
    if isinstance(window, Tensor):
        masks.append(window_mask(queries(), keys, window))
    if prefix is not None:
        masks.append(prefix_mask(queries(), keys, prefix))
    if block_sparse is not None:
        masks.append(block_sparse.mask(queries(), keys, heads or local, first, local))
    biases: list[Tensor] = []
    if slopes is not None:
        biases.append(alibi_bias(slopes, queries(), keys))
    if table is not None and relative is not None:
        biases.append(relative.bias(table, queries(), keys))
    elif table is not None:
        rows = F.gather(table, queries(), dim=1).permute(1, 0, 2, 3)
        biases.append(F.slice(rows, 3, 0, keys).cast("f32"))
    return F.attention(
        q,
        k,
        v,
        head_dim,
        bias=_joined(F.add, bias, *biases),
        mask=_joined(F.and_, mask, *masks),
        past=past,
        lengths=lengths,
        sinks=sinks,
        causal=causal and not masks,  # every mask here is causal where it has to be
        window=window if isinstance(window, int) else 0,
        scale=scale,
        softcap=softcap,
    )


def head_count(x: Tensor, head_dim: int) -> int:
    """How many heads x [B, S, heads*head_dim] has."""
    heads = exact_divide(x.shape[-1], head_dim)
    if not isinstance(heads, int):
        raise Error(f"attention: expected [batch, tokens, heads*{head_dim}], found {x.type}")
    return heads


def _joined(join: Callable[[Tensor, Tensor], Tensor], *parts: Tensor | None) -> Tensor | None:
    """The parts that are there, joined."""
    present = [part for part in parts if part is not None]
    return reduce(join, present) if present else None
