"""What the attention layers have in common: heads, projections, positions and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....source import here
from ... import functional as F
from ...layers import BlockSparse
from ...layers.positions import alibi_slopes, rotated
from ...tensor import Tensor as Inner
from ..context import dialect
from ..enums import AttentionMaskType, LayerNormType, PositionEmbeddingType
from ..errors import ArgumentError
from ..functional.attention import relative_rule
from ..functional.cached_attention import Heads, Rules
from ..functional.rotary import Rotary, chatglm_rotated, mrope_angles
from ..module import Module, Parameter
from ..tensor import Tensor, unwrap, wrap
from .attention_parameters import BlockSparseAttnParams, MropeParams
from .linear import ColumnLinear, RowLinear, sharded_parameter
from .norms import LayerNorm, RmsNorm


def local_heads(
    hidden_size: int, heads: int, kv_heads: int | None, width: int | None, rank: int, ranks: int
) -> Heads:
    """The heads of one rank of `ranks`, of hidden_size / heads features unless told; where there
    are fewer key-value heads than ranks, each is on ranks / kv_heads of them."""
    kv = heads if kv_heads is None else kv_heads
    if heads < 1 or (not width and hidden_size % heads):
        raise ArgumentError(
            f"hidden_size={hidden_size} is no multiple of num_attention_heads={heads}; give "
            "attention_head_size",
            loc=here(),
        )
    if heads % ranks:
        raise ArgumentError(
            f"num_attention_heads={heads} must be a multiple of tp_size={ranks}", loc=here()
        )
    if kv < 1 or heads % kv or (kv % ranks and ranks % kv):
        raise ArgumentError(
            f"num_kv_heads={kv}: expected a divisor of {heads} heads, and a multiple or a divisor "
            f"of tp_size={ranks}, so that every rank has whole groups of heads",
            loc=here(),
        )
    return Heads(heads // ranks, max(kv // ranks, 1), width or hidden_size // heads, rank, ranks)


class AttentionBase(Module):
    """The projections and the scores that all attention layers have."""

    q_scaling: float
    rel_attn_table: Parameter | None = None
    attention_mask_type = AttentionMaskType.padding
    position_embedding_type = PositionEmbeddingType.learned_absolute
    alibi_bias_max = 8
    rotary: Rotary | None = None
    clip_qkv: float | None = None
    max_attn_value = 0.0
    qk_layernorm = False
    layernorm_share = True
    q_layernorm: Any = None
    k_layernorm: Any = None
    block_sparse_params = BlockSparseAttnParams()

    def _build(
        self,
        hidden_size: int,
        heads: Heads,
        bias: bool,
        dense_bias: bool,
        dtype: Any,
        tp_group: Sequence[int] | None,
        instance_id: int | None = None,
    ) -> None:
        if heads.ranks > 1 and tp_group is None:
            raise ArgumentError(f"attention: tp_size={heads.ranks} needs a tp_group", loc=here())
        q, k, v = heads.sizes
        self.heads, self.dtype = heads, dtype
        self.hidden_size = hidden_size // (heads.ranks if dialect() == "A" else 1)
        self.tp_group, self.tp_size, self.tp_rank = tp_group, heads.ranks, heads.rank
        self.num_attention_heads, self.num_attention_kv_heads = heads.query, heads.kv
        self.attention_head_size, self.attention_hidden_size = heads.width, q
        self.qkv = ColumnLinear(
            hidden_size,
            heads.ranks * (q + k + v),
            bias=bias,
            dtype=dtype,
            tp_group=tp_group,
            tp_size=heads.ranks,
            gather_output=False,
            is_qkv=True,
        )
        self.dense = RowLinear(
            in_features=heads.ranks * q,
            out_features=hidden_size,
            bias=dense_bias,
            dtype=dtype,
            tp_group=tp_group,
            tp_size=heads.ranks,
            instance_id=instance_id,
        )

    def _scale(self, q_scaling: float, by_layers: int) -> None:
        """scores = q kᵀ / (q_scaling * sqrt(head size)), both times the layers where asked for."""
        self.q_scaling = q_scaling * by_layers
        self.norm_factor = math.sqrt(self.attention_head_size) * by_layers
        self.score_scale = 1 / (self.q_scaling * math.sqrt(self.attention_head_size))

    def _relate(self, relative: bool, buckets: int, max_distance: int) -> None:
        """The table of relative biases of this rank's heads, [heads, buckets]."""
        self.relative_attention, self.max_distance = relative, max_distance
        self.num_buckets = buckets
        if relative and buckets:
            shape = (self.heads.query, buckets)
            group = self.tp_group if self.tp_size > 1 else None
            self.rel_attn_table = sharded_parameter(shape, self.dtype, 0, group)

    def set_rel_attn_table(self, max_seq_len: int, precomputed_relative_attention: Any) -> None:
        """Use biases [heads, max_seq_len + 1, max_seq_len + 1] of query and key positions."""
        shape = (self.heads.query, max_seq_len + 1, max_seq_len + 1)
        self.rel_attn_table = Parameter(shape=shape, dtype=self.dtype)
        self.rel_attn_table.value = precomputed_relative_attention

    def _relative(self, bidirectional: bool) -> tuple[Any, Inner | None]:
        if not self.relative_attention:
            return None, None
        if self.rel_attn_table is None:
            raise Error(
                "relative attention needs num_buckets and max_distance, or a table by "
                "set_rel_attn_table",
                loc=here(),
            )
        table = unwrap(self.rel_attn_table.value)
        return relative_rule(table, self.max_distance if table.ndim == 2 else 0, bidirectional)

    def _norm(self, kind: LayerNormType, heads: int, eps: float) -> Any:
        """A norm of the features of every head, with one weight for all heads or one for each."""
        made, width = norm_class(kind), self.attention_head_size
        if self.layernorm_share:
            return made(width, eps=eps, dtype=self.dtype)
        if kind is not LayerNormType.LayerNorm:
            raise ArgumentError("layernorm_share=False needs LayerNormType.LayerNorm", loc=here())
        shape = (heads, width)
        return made(shape, eps=eps, dtype=self.dtype, bias=False, tp_size=self.tp_size, tp_dim=0)

    def _projected(self, x: Tensor, by_head: bool) -> tuple[Inner, Inner, Inner]:
        """Queries, keys and values, clipped and normalized.

        `by_head`: in the features of `qkv`, those of a head follow each other.
        """
        qkv = unwrap(self.qkv(x))
        if self.clip_qkv is not None:
            qkv = F.clip(qkv, low=-float(self.clip_qkv), high=float(self.clip_qkv))
        q, k, v = self._split_heads(qkv, by_head or self.qk_layernorm)
        if not self.qk_layernorm:
            return q, k, v
        return self._normed(self.q_layernorm, q), self._normed(self.k_layernorm, k), v

    def _split_heads(self, qkv: Inner, by_head: bool) -> tuple[Inner, Inner, Inner]:
        heads = self.heads
        if not by_head or heads.query != heads.kv:
            return heads.split(qkv)
        split = qkv.reshape(*qkv.shape[:2], heads.query, 3, heads.width)
        q, k, v = (split[:, :, :, i].reshape(*qkv.shape[:2], -1) for i in range(3))
        return q, k, v

    def _normed(self, norm: Any, x: Inner) -> Inner:
        """x [B, S, heads*width] with every head normalized."""
        heads = x.reshape(*x.shape[:2], -1, self.attention_head_size)
        if self.layernorm_share:
            return unwrap(norm(wrap(heads))).reshape(*x.shape)
        weight = unwrap(norm.weight.value).cast(x.dtype)
        return (F.layer_norm(heads, eps=norm.eps) * weight).reshape(*x.shape)

    def _positioned(
        self,
        q: Inner,
        k: Inner,
        queries: Inner,
        embedding: Inner | None,
        ids: Inner | None,
        mrope: MropeParams | None,
        prompt: Inner | None,
    ) -> tuple[Inner, Inner]:
        """Queries and keys rotated by the positions of their tokens."""
        width = self.attention_head_size
        if self.rotary is None:
            return q, k
        if self.position_embedding_type is PositionEmbeddingType.chatglm:
            given = embedding if embedding is not None else ids
            q, k = (chatglm_rotated(x, given, width, self.rotary.rope) for x in (q, k))
            return q, k
        if ids is not None and (self.position_embedding_type.is_mrope() or ids.ndim == 2):
            positions = ids
        else:
            positions = F.expand(queries, q.shape[:2])
        if mrope is not None and mrope.mrope_rotary_cos_sin is not None:
            rope = self.rotary.rope
            cos, sin = mrope_angles(
                unwrap(mrope.mrope_rotary_cos_sin),
                unwrap(mrope.mrope_position_deltas),
                F.expand(queries, q.shape[:2]),
                prompt,
                rope.theta,
                rope.rotary_dim,
            )
            return rotated(q, cos, sin, width, False), rotated(k, cos, sin, width, False)
        return self.rotary(q, positions, width), self.rotary(k, positions, width)

    def _rules(self, window: int | Inner = 0, bidirectional: bool = False) -> Rules:
        """The rules of the scores of this rank's heads; `bidirectional` is of relative biases."""
        slopes = None
        if self.position_embedding_type.is_alibi():
            heads = self.heads
            slopes = alibi_slopes(
                heads.query * heads.ranks,
                float(self.alibi_bias_max),
                heads.query * heads.rank,
                heads.query,
            )
            if self.position_embedding_type is PositionEmbeddingType.alibi_with_scale:
                slopes = slopes / self.norm_factor
        sparse = self.block_sparse_params
        return Rules(
            self.attention_mask_type,
            self.score_scale,
            float(self.max_attn_value),
            window,
            BlockSparse(
                sparse.block_size,
                sparse.num_local_blocks,
                sparse.vertical_stride,
                sparse.homo_head_pattern,
            ),
            slopes,
            *self._relative(bidirectional),
        )


def norm_class(kind: LayerNormType) -> Any:
    """The class of a norm over the features."""
    found = {LayerNormType.LayerNorm: LayerNorm, LayerNormType.RmsNorm: RmsNorm}.get(kind)
    if found is None:
        raise ArgumentError(
            f"attention: expected LayerNormType.LayerNorm or RmsNorm, found {kind!r}", loc=here()
        )
    return found
