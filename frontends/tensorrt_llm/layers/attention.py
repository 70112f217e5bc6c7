"""`Attention` and `BertAttention`: attention of one rank's heads, between two projections."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ....errors import Error
from ....source import here
from ... import functional as F
from ...layers import BlockSparse, Rope
from ...layers.caches import Heads, grow
from ...layers.positions import alibi_slopes, logn_scale, query_positions, rotated
from ...layers.rope import mrope_angles
from ...tensor import Tensor
from ..api import api, release
from ..arithmetic import unwrapped
from ..context import current_network
from ..enums import AttentionMaskType, LayerNormType, PositionEmbeddingType
from ..errors import ArgumentError
from ..functional.attention import (
    AttentionSettings,
    attend_with,
    cache_codes,
    filled_keys,
    relative_rule,
    run_attention,
    run_cross_attention,
    window_of,
)
from ..functional.packed import packed_rows
from ..functional.positions import rope_of, scaling_type
from ..module import Module, Parameter
from ..quantization import QuantMode
from .attention_params import (
    AttentionParams,
    BlockSparseAttnParams,
    KeyValueCacheParams,
    MropeParams,
)
from .linear import NO_MODE, ColumnLinear, RowLinear, sharded_parameter
from .norms import LayerNorm, RmsNorm
from .quantized import FP8Linear, FP8RowLinear


@dataclass(eq=False, repr=False)
class AttentionBase(Module):
    """The projections, heads and scores that both layers have; the fields are their arguments.

    Per rank the weight of `qkv` is [(heads + 2 * kv_heads) * head size, hidden_size] of this rank's
    queries, keys and values. Where there are fewer key-value heads than ranks, each is on several.
    """

    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int | None = None
    attention_head_size: int | None = None
    max_position_embeddings: int = 1024
    num_layers: int = 1
    apply_query_key_layer_scaling: bool = False
    bias: bool = True
    dense_bias: bool | None = None
    dtype: Any = None
    tp_group: Sequence[int] | None = None
    tp_size: int = 1
    tp_rank: int = 0
    quant_mode: QuantMode = NO_MODE
    q_scaling: float = 1.0
    relative_attention: bool = False
    max_distance: int = 0
    num_buckets: int = 0

    def __post_init__(self) -> None:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if heads < 1 or (not self.attention_head_size and hidden % heads):
            raise ArgumentError(
                f"hidden_size={hidden} is no multiple of num_attention_heads={heads}; give "
                "attention_head_size",
                loc=here(),
            )
        kv = heads if self.num_kv_heads is None else self.num_kv_heads
        width = self.attention_head_size or hidden // heads
        self.heads = Heads.of_rank(heads, kv, width, self.tp_rank, self.tp_size)
        if self.tp_size > 1 and self.tp_group is None:
            raise ArgumentError(f"attention: tp_size={self.tp_size} needs a tp_group", loc=here())
        self.dense_bias = self.bias if self.dense_bias is None else self.dense_bias
        self.use_fp8_qdq = self.quant_mode.has_fp8_qdq() and release() < 8
        column, row = (FP8Linear, FP8RowLinear) if self.use_fp8_qdq else (ColumnLinear, RowLinear)
        group: Any = {"dtype": self.dtype, "tp_group": self.tp_group, "tp_size": self.tp_size}
        outputs, queries = sum(self.heads.sizes), self.heads.sizes[0]
        self.qkv = column(
            hidden, self.tp_size * outputs, bias=self.bias, gather_output=False, **group
        )
        self.dense = row(self.tp_size * queries, hidden, bias=self.dense_bias, **group)
        # from here on those of one rank, as in TensorRT-LLM
        self.hidden_size = hidden // (self.tp_size if release() < 8 else 1)
        self.num_attention_heads = self.heads.query_heads
        self.num_attention_kv_heads = self.heads.kv_heads
        self.attention_head_size, self.attention_hidden_size = width, queries
        layers = self.num_layers if self.apply_query_key_layer_scaling else 1
        self.q_scaling, self.norm_factor = self.q_scaling * layers, math.sqrt(width) * layers
        self.rel_attn_table: Parameter | None = None
        if self.relative_attention and self.num_buckets:
            shape = (self.num_attention_heads, self.num_buckets)
            self.rel_attn_table = sharded_parameter(shape, self.dtype, 0, self.shards)

    @property
    def shards(self) -> Sequence[int] | None:
        """The ranks that share the heads."""
        return self.tp_group if self.tp_size > 1 else None

    def settings(self, bidirectional: bool, **more: Any) -> AttentionSettings:
        """The settings of a call; `bidirectional` is of relative biases."""
        if self.relative_attention and self.rel_attn_table is None:
            raise Error(
                "relative attention needs num_buckets and max_distance, or a table by "
                "set_rel_attn_table",
                loc=here(),
            )
        if self.relative_attention and self.rel_attn_table is not None:
            table = self.rel_attn_table.inner
            distance = self.max_distance if table.ndim == 2 else 0
            more |= relative_rule(table, distance, bidirectional)
        scale = 1 / (self.q_scaling * math.sqrt(self.heads.head_size))
        return AttentionSettings(self.heads, scale=scale, **more)


@api("layers.attention.Attention", inner=True)
@dataclass(eq=False, repr=False)
class Attention(AttentionBase):
    """softmax(q kᵀ) v of the heads of one rank, from one projection `qkv` and into `dense`.

    With chatglm positions or `qk_layernorm`, and as many key-value heads as heads, query, key and
    value of a head follow each other in the features of `qkv`. `rotary_embedding_base` and
    `rotary_embedding_scaling` count with and without the plugin, relative tables belong to the
    heads of their rank, and causal masks are computed, not stored.
    """

    local_layer_idx: int = 0
    qk_layernorm: bool = False
    layernorm_type: LayerNormType = LayerNormType.LayerNorm
    layernorm_share: bool = True
    inner_layernorm: Any = False
    eps: float = 1e-05
    attention_mask_type: AttentionMaskType = AttentionMaskType.padding
    position_embedding_type: PositionEmbeddingType = PositionEmbeddingType.learned_absolute
    rotary_embedding_base: float = 10000.0
    rotary_embedding_scaling: Mapping[str, Any] | None = None
    rotary_embedding_percentage: float = 1.0
    rope_scaling_short_factors: Sequence[float] | None = None
    rope_scaling_long_factors: Sequence[float] | None = None
    rope_scaling_short_mscale: float | None = None
    rope_scaling_long_mscale: float | None = None
    original_max_position_embeddings: int = 1024
    use_int8_kv_cache: bool = False
    cross_attention: bool = False
    clip_qkv: float | None = None
    alibi_bias_max: int = 8
    skip_cross_kv: bool = False
    skip_cross_qkv: bool = False
    max_attn_value: float = 0.0
    block_sparse_params: BlockSparseAttnParams | None = None
    layer_idx_in_cache_pool: int | None = None
    max_seqlen_for_logn_scaling: int = 8192
    use_logn_scaling: bool = False
    enable_qkv: bool = True

    def __post_init__(self) -> None:
        if not self.enable_qkv:
            raise ArgumentError("attention always has the projection qkv", loc=here())
        if self.inner_layernorm and self.tp_size > 1:
            raise ArgumentError("inner_layernorm needs the heads of all ranks", loc=here())
        super().__post_init__()
        kind, width = self.position_embedding_type, self.heads.head_size
        self.layer_idx = self.local_layer_idx
        self.skip_cross_kv = self.skip_cross_kv or self.skip_cross_qkv
        self.scale_alibi_bias = kind is PositionEmbeddingType.alibi_with_scale
        # what scripts with a forward of their own pass to gpt_attention
        self.rotary_embedding_scale_type = scaling_type(self.rotary_embedding_scaling)
        self.rotary_embedding_scale = float((self.rotary_embedding_scaling or {}).get("factor", 1))
        self.rotary_enabled = kind.is_rope()
        self.rotary_embedding_dim = int(width * self.rotary_embedding_percentage) * kind.is_rope()
        self.rope: Rope | None = None
        if kind.is_rope() or kind is PositionEmbeddingType.chatglm:
            self.rope = rope_of(
                kind,
                width,
                base=self.rotary_embedding_base,
                scaling=self.rotary_embedding_scaling,
                percentage=self.rotary_embedding_percentage,
                max_positions=self.max_position_embeddings,
                original_positions=self.original_max_position_embeddings,
                factors=(self.rope_scaling_short_factors, self.rope_scaling_long_factors),
                scales=(self.rope_scaling_short_mscale, self.rope_scaling_long_mscale),
            )
        # the scale of a quantized cache; up to 0.7 under the second name, with its reciprocal
        self.kv_cache_scaling_factor: Parameter | None = None
        self.kv_quant_orig_scale: Parameter | None = None
        self.kv_orig_quant_scale: Parameter | None = None
        int8 = QuantMode.INT8_KV_CACHE if self.use_int8_kv_cache else QuantMode(0)
        self.quantize_cache(self.quant_mode | int8)
        norm: Any = norm_class(self.layernorm_type)
        if self.qk_layernorm:
            self.q_layernorm = self._norm(norm, self.heads.query_heads)
            self.k_layernorm = self._norm(norm, self.heads.kv_heads)
        if self.inner_layernorm:
            self.inner_layernorm = norm(self.hidden_size, dtype=self.dtype, eps=self.eps)

    def quantize_cache(self, mode: QuantMode) -> None:
        """Hold the KV cache as codes where `mode` says so, times a scale [1]."""
        self.quant_mode |= mode
        self.use_int8_kv_cache = self.quant_mode.has_int8_kv_cache()
        if not mode.has_kv_cache_quant():
            return
        scale = Parameter(shape=(1,), dtype="float32")
        if release() < 8:
            self.kv_quant_orig_scale = scale
            self.kv_orig_quant_scale = Parameter(shape=(1,), dtype="float32")
        else:
            self.kv_cache_scaling_factor = scale

    def set_rel_attn_table(self, max_seq_len: int, precomputed_relative_attention: Any) -> None:
        """Use biases [heads, max_seq_len + 1, max_seq_len + 1] of query and key positions."""
        shape = (self.heads.query_heads, max_seq_len + 1, max_seq_len + 1)
        self.rel_attn_table = Parameter(shape=shape, dtype=self.dtype)
        self.rel_attn_table.value = precomputed_relative_attention

    @staticmethod
    def create_attention_const_params(model_cls: Any, config: Any) -> None:
        """Nothing: irc computes the angles of rotary embeddings."""

    @staticmethod
    def fill_attention_params(
        model_cls: Any, attention_params: AttentionParams | None
    ) -> AttentionParams:
        """`attention_params`, or empty ones."""
        return attention_params or AttentionParams()

    def _norm(self, norm: Any, heads: int) -> Any:
        """A norm of the features of every head, with one weight for all heads or one for each."""
        width = self.heads.head_size
        if self.layernorm_share:
            return norm(width, eps=self.eps, dtype=self.dtype)
        if norm is not LayerNorm:
            raise ArgumentError("layernorm_share=False needs LayerNormType.LayerNorm", loc=here())
        own = LayerNorm(normalized_shape=(heads, width), eps=self.eps, dtype=self.dtype)
        own.weight = sharded_parameter((heads, width), self.dtype, 0, self.shards)
        own.bias = None
        return own

    # -- the graph

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        use_cache: bool = False,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        encoder_output: Any = None,
        position_embedding: Any = None,
        mrope_params: MropeParams | None = None,
        position_ids: Any = None,
        cross_kv_cache_gen: Any = None,
        cross_kv_reuse: Any = None,
        cross_qkv_reuse: Any = None,
        all_reduce_params: Any = None,
        reduce_fusion_params: Any = None,
        attention_packed_mask: Any = None,
    ) -> Any:
        """hidden_states [B, S, hidden_size] to the same; with `use_cache` to (the same, cache).

        Without the attention plugin the cache [B, 2, kv, P, D] grows by the tokens of the call, and
        `attention_mask` is over all keys. With it the cache has a capacity, and
        host_past_key_value_lengths says how much of it is filled.
        """
        if attention_packed_mask is not None and attention_mask is None:
            raise Error(
                "attention_packed_mask has the bits of attention_mask, which irc reads: give "
                "attention_mask, one number per query and key",
                loc=here(),
            )
        caches = kv_cache_params or KeyValueCacheParams()
        sizes = attention_params or AttentionParams()
        prompt = unwrapped(sizes.context_lengths)
        by_head = position_embedding is not None and position_embedding.ndim == 3
        settings, switches = self._settings(), current_network().plugin_config
        x, is_pair = hidden_states, isinstance(hidden_states, tuple)  # codes and their scales
        given = _first(hidden_states)
        rows = packed_rows(
            given,
            prompt,
            unwrapped(sizes.host_request_types),
            unwrapped(caches.host_past_key_value_lengths),
        )
        x = x if is_pair or given.ndim == 3 else given.unsqueeze(0)
        q, k, v = self._projected(x, by_head)
        if rows is not None:
            q, k, v = (rows.pad(each) for each in (q, k, v))
            position_ids = None  # counted from the cache
        if self.cross_attention:
            reuse = cross_qkv_reuse if cross_kv_reuse is None else cross_kv_reuse
            kv = self._encoded(encoder_output, by_head, cross_kv_cache_gen, reuse)
            mask = None if release() < 8 else attention_mask  # up to 0.7 that of the decoder
            lengths = unwrapped(sizes.encoder_input_lengths)
            context, cache = run_cross_attention(settings, q, kv, lengths, mask)
        else:
            past = unwrapped(caches.get_first_past_key_value())
            window = window_of(caches.windows, self.local_layer_idx)
            plugin = bool(switches.gpt_attention_plugin) or rows is not None
            filled = filled_keys(past, caches.host_past_key_value_lengths) if plugin else None
            before = 0 if past is None else past.shape[3] if filled is None else filled
            queries = query_positions(q.shape[1], before)
            ids = position_ids if position_embedding is None else position_embedding
            q, k = self._positioned(q, k, queries, ids, mrope_params or MropeParams(), prompt)
            if plugin:
                context, cache = run_attention(
                    settings,
                    (q, k, v),
                    past,
                    filled,
                    mask=attention_mask,
                    prompt=prompt,
                    window=window,
                    use_cache=use_cache,
                    packed=rows,
                )
            else:
                cache, k, v = grow(self.heads, past, k, v, settings.codes)
                seen: Any = {"mask": attention_mask, "prompt": prompt, "window": window}
                context = attend_with(settings, q, k, v, **seen)
        if self.inner_layernorm:
            context = self.inner_layernorm(context)
        out = self.project(context, all_reduce_params or reduce_fusion_params)
        return (out, cache) if use_cache else out

    def project(self, context: Tensor, all_reduce_params: Any) -> Any:
        """The output of the layer."""
        return self.dense(context, all_reduce_params=all_reduce_params)

    def _settings(self) -> AttentionSettings:
        slopes, heads = None, self.heads
        if self.position_embedding_type.is_alibi():
            every, first = heads.query_heads * heads.tp_size, heads.query_heads * heads.tp_rank
            slopes = alibi_slopes(every, float(self.alibi_bias_max), first, heads.query_heads)
            slopes = slopes / self.norm_factor if self.scale_alibi_bias else slopes
        sparse = self.block_sparse_params or BlockSparseAttnParams()
        scale = self.kv_quant_orig_scale if release() < 8 else self.kv_cache_scaling_factor
        return self.settings(
            bidirectional=False,
            mask_type=self.attention_mask_type,
            softcap=float(self.max_attn_value),
            slopes=slopes,
            block_sparse=BlockSparse(
                sparse.block_size or 64,
                sparse.num_local_blocks or 16,
                sparse.vertical_stride or 8,
                bool(sparse.homo_head_pattern),
            ),
            codes=cache_codes(self.quant_mode, None if scale is None else scale.inner),
        )

    def _projected(self, x: Any, by_head: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, clipped and normalized."""
        qkv: Tensor = self.qkv(x)
        if self.clip_qkv is not None:
            qkv = F.clip(qkv, low=-float(self.clip_qkv), high=float(self.clip_qkv))
        if by_head or self.qk_layernorm:
            q, k, v = self.heads.split_by_head(qkv)
        else:
            q, k, v = self.heads.split(qkv)
        if self.qk_layernorm:
            q, k = self._normed(self.q_layernorm, q), self._normed(self.k_layernorm, k)
        return q, k, v

    def _normed(self, norm: Any, x: Tensor) -> Tensor:
        """x [B, S, heads*head_size] with every head normalized."""
        heads = x.reshape(*x.shape[:2], -1, self.heads.head_size)
        if self.layernorm_share:
            return norm(heads).reshape(*x.shape)
        weight = norm.weight.inner.cast(x.dtype)
        return (F.layer_norm(heads, eps=norm.eps) * weight).reshape(*x.shape)

    def _positioned(
        self,
        q: Tensor,
        k: Tensor,
        queries: Tensor,
        ids: Tensor | None,
        mrope: MropeParams,
        prompt: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys turned by the positions of their tokens, and queries by log n."""
        rope, width = self.rope, self.heads.head_size
        if rope is not None and rope.halves and ids is None:
            raise Error("attention with chatglm positions needs position_embedding", loc=here())
        every = F.expand(queries, q.shape[:2])
        if mrope.mrope_rotary_sin_cos is not None and rope is not None:
            table, deltas = (
                unwrapped(x) for x in (mrope.mrope_rotary_sin_cos, mrope.mrope_position_deltas)
            )
            cos, sin = mrope_angles(table, deltas, every, prompt, rope)
            q, k = (rotated(x, cos, sin, width, False) for x in (q, k))
        elif rope is not None:
            own = ids is not None and (ids.ndim == 2 or rope.halves or bool(rope.sections))
            positions = ids if own and ids is not None else every
            q, k = rope(q, positions, width), rope(k, positions, width)
        if self.use_logn_scaling:
            q = q * logn_scale(queries, self.max_seqlen_for_logn_scaling).cast(q.dtype)
        return q, k

    def _encoded(
        self, encoder_output: Any, by_head: bool, generate: Any, reuse: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, kv*head_size] of the encoder's output.

        With `skip_cross_kv` they are `reuse` [B, T, 2*kv*head_size] where `generate` bool [1] is
        false. Both are computed.
        """
        if encoder_output is None:
            raise Error("cross attention needs encoder_output, found None", loc=here())
        _, k, v = self._projected(encoder_output, by_head)
        if not self.skip_cross_kv or generate is None or reuse is None:
            return k, v
        _, width, _ = self.heads.sizes
        kept = F.slice(reuse, 2, reuse.shape[2] - 2 * width, reuse.shape[2]).split(width, 2)
        chosen = generate.reshape(1, 1, 1)
        fresh = chosen if chosen.dtype == "bool" else F.ne(chosen, 0)
        return F.where(fresh, k, kept[0].cast(k.dtype)), F.where(fresh, v, kept[1].cast(v.dtype))


def _first(given: Any) -> Tensor:
    pair = cast("tuple[Tensor, Tensor]", given)
    return pair[0] if isinstance(given, tuple) else cast("Tensor", given)


@api("layers.attention.BertAttention", inner=True)
@dataclass(eq=False, repr=False)
class BertAttention(AttentionBase):
    """Attention over whole sequences, without a cache: the rows see their first keys only."""

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, input_lengths: Any = None
    ) -> Any:
        """hidden_states [B, S, hidden_size] to the same.

        `attention_mask` [B, S] hides keys where it is 0; up to 0.7 it is added to the scores
        [B, heads, S, S]. `input_lengths` i32 [B] hides keys behind the end of a row.
        """
        settings = self.settings(True, mask_type=AttentionMaskType.padding)
        seen = {"bias" if release() < 8 else "mask": attention_mask}
        q, k, v = self.heads.split(self.qkv(hidden_states))
        return self.dense(attend_with(settings, q, k, v, lengths=input_lengths, **seen))


def norm_class(kind: LayerNormType) -> Any:
    """The class of a norm over the features."""
    norm = {LayerNormType.LayerNorm: LayerNorm, LayerNormType.RmsNorm: RmsNorm}.get(kind)
    if norm is None:
        raise ArgumentError(
            f"attention: expected LayerNormType.LayerNorm or RmsNorm, found {kind!r}", loc=here()
        )
    return norm
