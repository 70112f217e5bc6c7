"""`Attention` and `BertAttention`: attention of one rank's heads, between two projections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ... import functional as F
from ...layers import BlockSparse
from ...layers.caches import Heads, grow
from ...layers.packed import packed_rows
from ...layers.positions import alibi_slopes
from ...tensor import Tensor
from ..api import api, fields, release
from ..arithmetic import unwrapped
from ..context import current_network
from ..enums import AttentionMaskType, LayerNormType, PositionEmbeddingType
from ..errors import ArgumentError, ScriptError
from ..functional.attention import (
    AttentionSettings,
    Rotation,
    attend_with,
    cache_codes,
    filled_keys,
    relative_rule,
    rope_of,
    scaling_type,
    self_attention,
    unify_rows,
    window_of,
)
from ..module import Module, Parameter
from ..quantization import QuantMode
from .attention_params import AttentionParams, BlockSparseAttnParams, KeyValueCacheParams
from .linear import NO_MODE, ColumnLinear, FP8Linear, FP8RowLinear, RowLinear, sharded_parameter
from .norms import LayerNorm, RmsNorm

_NORMS: dict[Any, Any] = {LayerNormType.LayerNorm: LayerNorm, LayerNormType.RmsNorm: RmsNorm}


class AttentionBase(Module):
    """The projections, heads and scores that both layers have.

    The arguments of the row are attributes. Per rank the weight of `qkv` is
    [(heads + 2 * kv_heads) * head size, hidden_size] of this rank's queries, keys and values. Where
    there are fewer key-value heads than ranks, each is on several.
    """

    row: ClassVar[str]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, hidden_size: int, num_attention_heads: int, **given: Any) -> None:
        vars(self).update({"dense_bias": None, **fields(self.row, every=True), **given})
        hidden, heads, tp = hidden_size, num_attention_heads, self.tp_size
        if heads < 1 or (not self.attention_head_size and hidden % heads):
            raise ArgumentError(
                f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; give "
                "attention_head_size"
            )
        kv = heads if self.num_kv_heads is None else self.num_kv_heads
        width = self.attention_head_size or hidden // heads
        self.heads = Heads.of_rank(heads, kv, width, self.tp_rank, tp)
        if tp > 1 and self.tp_group is None:
            raise ArgumentError(f"attention: tp_size={tp} needs a tp_group")
        self.dense_bias = self.bias if self.dense_bias is None else self.dense_bias
        self.quant_mode: Any = self.quant_mode or NO_MODE
        self.use_fp8_qdq = self.quant_mode.has_fp8_qdq() and release() < 8
        column, row = (FP8Linear, FP8RowLinear) if self.use_fp8_qdq else (ColumnLinear, RowLinear)
        group: Any = {"dtype": self.dtype, "tp_group": self.tp_group, "tp_size": tp}
        outputs, queries = tp * sum(self.heads.sizes), self.heads.sizes[0]
        self.qkv = column(hidden, outputs, bias=self.bias, gather_output=False, **group)
        self.dense = row(tp * queries, hidden, bias=self.dense_bias, **group)
        # from here on those of one rank, as in TensorRT-LLM
        self.hidden_size = hidden // (tp if release() < 8 else 1)
        self.num_attention_heads = self.heads.query_heads
        self.num_attention_kv_heads = self.heads.kv_heads
        self.attention_head_size, self.attention_hidden_size = width, queries
        layers = self.num_layers if self.apply_query_key_layer_scaling else 1
        self.q_scaling, self.norm_factor = self.q_scaling * layers, math.sqrt(width) * layers
        self.rel_attn_table: Parameter | None = None
        if self.relative_attention and self.num_buckets:
            shape = (self.num_attention_heads, self.num_buckets)
            shards: Sequence[int] | None = self.tp_group if tp > 1 else None
            self.rel_attn_table = sharded_parameter(shape, self.dtype, 0, shards)

    def settings(self, bidirectional: bool, **more: Any) -> AttentionSettings:
        """The settings of a call; `bidirectional` is of relative biases."""
        if self.relative_attention and self.rel_attn_table is None:
            raise ScriptError(
                "relative attention needs num_buckets and max_distance, or a table by "
                "set_rel_attn_table"
            )
        if self.relative_attention and self.rel_attn_table is not None:
            table = self.rel_attn_table.inner
            distance = self.max_distance if table.ndim == 2 else 0
            more |= relative_rule(table, distance, bidirectional)
        return AttentionSettings(self.heads, q_scaling=self.q_scaling, **more)


@api("layers.attention.Attention", inner=True)
class Attention(AttentionBase):
    """softmax(q kᵀ) v of the heads of one rank, from one projection `qkv` and into `dense`.

    With `qk_layernorm`, and as many key-value heads as heads, query, key and value of a head follow
    each other in the features of `qkv`. `rotary_embedding_base` and `rotary_embedding_scaling`
    count with and without the plugin, relative tables belong to the heads of their rank, and causal
    masks are computed, not stored.
    """

    row = "layers.attention.Attention"

    def __init__(self, hidden_size: int, num_attention_heads: int, **given: Any) -> None:
        super().__init__(hidden_size, num_attention_heads, **given)
        self.attention_mask_type = self.attention_mask_type or AttentionMaskType.padding
        if not self.enable_qkv:
            raise ArgumentError("attention always has the projection qkv")
        if not self.layernorm_share:
            raise ArgumentError("attention has one norm for all heads")
        kind = self.position_embedding_type or PositionEmbeddingType.learned_absolute
        if kind is PositionEmbeddingType.chatglm:
            raise ArgumentError("attention: chatglm positions are not supported")
        self.position_embedding_type = kind
        self.layer_idx = self.local_layer_idx = self.local_layer_idx or 0
        self.scale_alibi_bias = kind is PositionEmbeddingType.alibi_with_scale
        # what scripts with a forward of their own pass to gpt_attention
        self.rotary_embedding_scale_type = scaling_type(self.rotary_embedding_scaling)
        scaling: dict[str, Any] = self.rotary_embedding_scaling or {}
        self.rotary_embedding_scale = float(scaling.get("factor", 1))
        width, self.rotary_enabled, self.rotary_embedding_dim = self.heads.head_size, False, 0
        self.rotation: Rotation | None = None
        if kind.is_rope():
            rope = rope_of(
                kind,
                width,
                base=self.rotary_embedding_base,
                scaling=self.rotary_embedding_scaling,
                percentage=self.rotary_embedding_percentage,
                max_positions=self.max_position_embeddings,
                original_positions=self.original_max_position_embeddings,
                factors=(self.rope_scaling_short_factors, self.rope_scaling_long_factors),
            )
            self.rotary_enabled, self.rotary_embedding_dim = True, rope.rotary_dim
            self.rotation = lambda x, positions: rope(x, positions, width)
        # the scale of a quantized cache; up to 0.7 under the second name, with its reciprocal
        self.kv_cache_scaling_factor: Parameter | None = None
        self.kv_quant_orig_scale: Parameter | None = None
        self.kv_orig_quant_scale: Parameter | None = None
        mode: Any = QuantMode.INT8_KV_CACHE if self.use_int8_kv_cache else NO_MODE
        self.quantize_cache(self.quant_mode | mode)
        if self.qk_layernorm:
            norm = _NORMS.get(self.layernorm_type or LayerNormType.LayerNorm)
            if norm is None:
                raise ArgumentError(
                    "attention: expected LayerNormType.LayerNorm or RmsNorm, found "
                    f"{self.layernorm_type!r}"
                )
            self.q_layernorm = norm(width, eps=self.eps, dtype=self.dtype)
            self.k_layernorm = norm(width, eps=self.eps, dtype=self.dtype)

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

    # -- the graph

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        use_cache: bool = False,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        encoder_output: Any = None,
        position_ids: Any = None,
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
            raise ScriptError(
                "attention_packed_mask has the bits of attention_mask, which irc reads: give "
                "attention_mask, one number per query and key"
            )
        caches = kv_cache_params or KeyValueCacheParams()
        sizes = attention_params or AttentionParams()
        prompt, types = unwrapped([sizes.context_lengths, sizes.host_request_types])
        filled = filled_keys(unwrapped(caches.host_past_key_value_lengths), types)
        x: Tensor = hidden_states
        rows = packed_rows(x, prompt, types, filled)
        q, k, v = self._projected(x.unsqueeze(0) if x.ndim == 2 else x)
        if rows is not None:
            q, k, v = (rows.pad(tokens) for tokens in (q, k, v))
        if self.cross_attention:
            lengths = unwrapped(sizes.encoder_input_lengths)
            mask = None if release() < 8 else attention_mask  # up to 0.7 that of the decoder
            context, cache = self._crossed(q, encoder_output, lengths, mask)
        else:
            counted = rows is not None or position_ids is None or position_ids.ndim != 2
            plugin = rows is not None or bool(current_network().plugin_config.gpt_attention_plugin)
            context, cache = self_attention(
                self._settings(self.attention_mask_type),
                (q, k, v),
                unwrapped(caches.get_first_past_key_value()),
                filled if plugin else None,
                positions=None if counted else position_ids,
                mask=attention_mask,
                prompt=prompt,
                window=window_of(caches.windows, self.local_layer_idx),
                packed=rows,
                plugin=plugin,
            )
        out = self.dense(context, all_reduce_params=all_reduce_params or reduce_fusion_params)
        return (out, cache) if use_cache else out

    def _settings(self, mask_type: AttentionMaskType) -> AttentionSettings:
        slopes, heads = None, self.heads
        if self.position_embedding_type.is_alibi():
            every, first = heads.query_heads * heads.tp_size, heads.query_heads * heads.tp_rank
            slopes = alibi_slopes(every, float(self.alibi_bias_max), first, heads.query_heads)
            slopes = slopes / self.norm_factor if self.scale_alibi_bias else slopes
        sparse = self.block_sparse_params or BlockSparseAttnParams()
        scale = self.kv_quant_orig_scale if release() < 8 else self.kv_cache_scaling_factor
        return self.settings(
            bidirectional=False,
            mask_type=mask_type,
            softcap=float(self.max_attn_value),
            rotation=self.rotation,
            logn=self.max_seqlen_for_logn_scaling if self.use_logn_scaling else 0,
            slopes=slopes,
            block_sparse=BlockSparse(
                sparse.block_size,
                sparse.num_local_blocks,
                sparse.vertical_stride,
                sparse.homo_head_pattern,
            ),
            codes=cache_codes(self.quant_mode, None if scale is None else scale.inner),
        )

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, clipped and normalized."""
        qkv: Tensor = self.qkv(x)
        if self.clip_qkv is not None:
            qkv = F.clip(qkv, low=-float(self.clip_qkv), high=float(self.clip_qkv))
        if not self.qk_layernorm:
            return self.heads.split(qkv)
        q, k, v = self.heads.split_by_head(qkv)
        by_head = [tokens.reshape(*tokens.shape[:2], -1, self.heads.head_size) for tokens in (q, k)]
        q_normed, k_normed = self.q_layernorm(by_head[0]), self.k_layernorm(by_head[1])
        return q_normed.reshape(*q.shape), k_normed.reshape(*k.shape), v

    def _crossed(
        self, q: Tensor, encoder_output: Any, lengths: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(context, cache [B, 2, kv_heads, T, head_size]) over the keys of the encoder's output,
        `lengths` i32 [B] of each row."""
        if encoder_output is None:
            raise ScriptError("cross attention needs encoder_output, found None")
        _, k, v = self._projected(encoder_output)
        unify_rows(q, k, v, lengths, mask)
        settings = self._settings(AttentionMaskType.padding)
        cache, k, v = grow(self.heads, None, k, v, settings.codes)
        return attend_with(settings, q, k, v, lengths=lengths, mask=mask), cache


@api("layers.attention.BertAttention", inner=True)
class BertAttention(AttentionBase):
    """Attention over whole sequences, without a cache: the rows see their first keys only."""

    row = "layers.attention.BertAttention"

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
