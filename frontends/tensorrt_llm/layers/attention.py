"""`Attention`: self and cross attention of one rank's heads, with a KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import Error
from ....source import here
from ... import functional as F
from ...layers.positions import logn_scale, query_positions
from ...tensor import Tensor as Inner
from ..context import current_network, current_session, dialect, signatures
from ..enums import AttentionMaskType, LayerNormType, PositionEmbeddingType
from ..errors import ArgumentError
from ..functional.attention import cache_codes, counted_mask, window_of
from ..functional.attention_arguments import check_others
from ..functional.cached_attention import CacheCodes, cached, cross, filled_keys, grow
from ..functional.collectives import AllReduceParams
from ..functional.packed import packed_rows
from ..functional.rotary import rotary, scaling_type
from ..module import Parameter
from ..quantization import QuantMode
from ..tensor import Tensor, unwrap, wrap
from .attention_base import AttentionBase, local_heads, norm_class
from .attention_parameters import (
    AttentionParams,
    BlockSparseAttnParams,
    KeyValueCacheParams,
    MropeParams,
)
from .linear import refuse_lora


class Attention(AttentionBase):
    """softmax(q kᵀ) v of the heads of one rank, from one projection `qkv` and into `dense`.

    Per rank the weight of `qkv` is [(heads + 2 * kv_heads) * head size, hidden_size] of this rank's
    queries, keys and values; with chatglm positions or `qk_layernorm`, and as many key-value heads
    as heads, queries, keys and values of a head follow each other. Unlike in TensorRT-LLM,
    `rotary_embedding_base` and `rotary_embedding_scaling` count in every path, relative tables
    belong to the heads of their rank, and causal masks are no constants. Sequences have padding.
    Arguments about kernels and memory have no effect (`functional/attention_arguments.py`).
    """

    @signatures(
        a="hidden_size, num_attention_heads, num_kv_heads, max_position_embeddings, num_layers, "
        "apply_query_key_layer_scaling, attention_head_size, attention_mask_type, bias, dtype, "
        "position_embedding_type, rotary_embedding_base, rotary_embedding_scaling, "
        "rotary_embedding_percentage, tp_group, tp_size, tp_rank, use_auto_parallel, quant_mode, "
        "q_scaling, cross_attention, relative_attention, max_distance, num_buckets, instance_id, "
        "dense_bias",
        b="local_layer_idx, hidden_size, num_attention_heads, num_kv_heads, "
        "max_position_embeddings, num_layers, apply_query_key_layer_scaling, attention_head_size, "
        "qk_layernorm, layernorm_type, layernorm_share, inner_layernorm, eps, "
        "attention_mask_type, bias, dtype, position_embedding_type, rotary_embedding_base, "
        "rotary_embedding_scaling, rotary_embedding_percentage",
    )
    def __init__(
        self,
        *,
        hidden_size: int,
        num_attention_heads: int,
        local_layer_idx: int = 0,
        num_kv_heads: int | None = None,
        max_position_embeddings: int = 1024,
        num_layers: int = 1,
        apply_query_key_layer_scaling: bool = False,
        attention_head_size: int | None = None,
        qk_layernorm: bool = False,
        layernorm_type: LayerNormType = LayerNormType.LayerNorm,
        layernorm_share: bool = True,
        inner_layernorm: bool = False,
        eps: float = 1e-05,
        attention_mask_type: AttentionMaskType = AttentionMaskType.padding,
        bias: bool = True,
        dtype: Any = None,
        position_embedding_type: PositionEmbeddingType = PositionEmbeddingType.learned_absolute,
        rotary_embedding_base: float = 10000.0,
        rotary_embedding_base_local: float | None = None,
        rotary_embedding_scaling: Mapping[str, Any] | None = None,
        rotary_embedding_percentage: float = 1.0,
        rope_scaling_short_factors: Sequence[float] | None = None,
        rope_scaling_long_factors: Sequence[float] | None = None,
        rope_scaling_short_mscale: float | None = None,
        rope_scaling_long_mscale: float | None = None,
        original_max_position_embeddings: int = 1024,
        tp_group: Sequence[int] | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        quant_mode: QuantMode | None = None,
        q_scaling: float = 1.0,
        cross_attention: bool = False,
        relative_attention: bool = False,
        max_distance: int = 0,
        num_buckets: int = 0,
        dense_bias: bool | None = None,
        clip_qkv: float | None = None,
        alibi_bias_max: int = 8,
        skip_cross_kv: bool = False,
        max_attn_value: float = 0.0,
        block_sparse_params: BlockSparseAttnParams | None = None,
        max_seqlen_for_logn_scaling: int = 8192,
        use_logn_scaling: bool = False,
        is_local: bool = False,
        instance_id: int | None = None,
        use_int8_kv_cache: bool = False,
        scale_alibi_bias: bool = False,
        **others: Any,
    ) -> None:
        check_others("Attention", others)
        if inner_layernorm and tp_size > 1:
            raise ArgumentError("inner_layernorm needs the heads of all ranks", loc=here())
        heads = local_heads(
            hidden_size, num_attention_heads, num_kv_heads, attention_head_size, tp_rank, tp_size
        )
        width = heads.width
        self._build(
            hidden_size,
            heads,
            bias,
            bias if dense_bias is None else dense_bias,
            dtype,
            tp_group,
            instance_id,
        )
        self._scale(q_scaling, num_layers if apply_query_key_layer_scaling else 1)
        self._relate(relative_attention, num_buckets, max_distance)
        self.local_layer_idx = local_layer_idx
        self.max_position_embeddings = max_position_embeddings
        self.attention_mask_type = attention_mask_type
        kind = position_embedding_type
        if scale_alibi_bias and kind is PositionEmbeddingType.alibi:
            kind = PositionEmbeddingType.alibi_with_scale
        self.position_embedding_type, self.alibi_bias_max = kind, alibi_bias_max
        self.cross_attention, self.skip_cross_kv = cross_attention, skip_cross_kv
        self.clip_qkv, self.max_attn_value = clip_qkv, max_attn_value
        self.logn = max_seqlen_for_logn_scaling if use_logn_scaling else 0
        sparse = block_sparse_params or BlockSparseAttnParams()
        self.block_sparse_params = sparse
        self.rotary_embedding_scaling = rotary_embedding_scaling
        self.rotary_embedding_base = rotary_embedding_base
        if is_local and rotary_embedding_base_local is not None:
            self.rotary_embedding_base = rotary_embedding_base_local
        # what scripts pass to gpt_attention, which have a forward of their own
        self.rotary_embedding_scale_type = scaling_type(rotary_embedding_scaling)
        self.rotary_embedding_scale = float((rotary_embedding_scaling or {}).get("factor", 1.0))
        self.rotary_embedding_dim = 0
        if kind.is_rope():
            self.rotary_embedding_dim = int(width * rotary_embedding_percentage)
        if kind.is_rope() or kind is PositionEmbeddingType.chatglm:
            self.rotary = rotary(
                kind,
                width,
                base=self.rotary_embedding_base,
                scaling=rotary_embedding_scaling,
                percentage=rotary_embedding_percentage,
                max_positions=max_position_embeddings,
                original_positions=original_max_position_embeddings,
                short_factors=rope_scaling_short_factors,
                long_factors=rope_scaling_long_factors,
                mscales=(rope_scaling_short_mscale, rope_scaling_long_mscale),
            )
        self.quant_mode = quant_mode or QuantMode(0)
        self.kv_cache_scaling_factor: Parameter | None = None
        self.quantize_cache(QuantMode.INT8_KV_CACHE if use_int8_kv_cache else self.quant_mode)
        self.qk_layernorm, self.layernorm_share = qk_layernorm, layernorm_share
        if qk_layernorm:
            self.q_layernorm = self._norm(layernorm_type, heads.query, eps)
            self.k_layernorm = self._norm(layernorm_type, heads.kv, eps)
        self.inner_layernorm: Any = None
        if inner_layernorm:
            made = norm_class(layernorm_type)
            self.inner_layernorm = made(hidden_size, dtype=dtype, eps=eps)

    def quantize_cache(self, mode: QuantMode) -> None:
        """Hold the KV cache as codes where `mode` says so, of the scale kv_cache_scaling_factor."""
        if not mode.has_kv_cache_quant():
            return
        self.quant_mode |= mode
        self.kv_cache_scaling_factor = Parameter(shape=(1,), dtype="float32")
        if dialect() == "A":  # names of 0.5; the second, the reciprocal, is not used
            self.kv_quant_orig_scale = self.kv_cache_scaling_factor
            self.kv_orig_quant_scale = Parameter(shape=(1,), dtype="float32")

    @staticmethod
    def create_attention_const_params(model_cls: Any, config: Any) -> None:
        """Accepted, without effect: irc computes the angles of rotary embeddings."""

    @staticmethod
    def fill_attention_params(
        model_cls: Any, attention_params: AttentionParams | None
    ) -> AttentionParams:
        """`attention_params`, or empty ones."""
        return attention_params or AttentionParams()

    # -- the graph

    @signatures(
        a="hidden_states, attention_mask, use_cache, kv_cache_params, attention_params, "
        "encoder_output, workspace",
        b="hidden_states, attention_mask, attention_packed_mask, use_cache, spec_decoding_params, "
        "mrope_params, kv_cache_params, attention_params, encoder_output, position_embedding, "
        "norm_before_bmm1, lora_layer_params",
    )
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        encoder_output: Tensor | None = None,
        workspace: Tensor | None = None,
        position_embedding: Tensor | None = None,
        lora_layer_params: Any = None,
        mrope_params: MropeParams | None = None,
        position_ids: Tensor | None = None,
        cross_kv_cache_gen: Tensor | None = None,
        cross_kv_reuse: Tensor | None = None,
        all_reduce_params: AllReduceParams | None = None,
        **others: Any,
    ) -> Any:
        """hidden_states [B, S, hidden_size] to the same; with `use_cache` to (the same, cache).

        Without the attention plugin the cache [B, 2, kv, P, D] grows by the tokens of the call, and
        `attention_mask` is over all keys. With it the cache has a capacity, and
        host_past_key_value_lengths says how much of it is filled.
        """
        refuse_lora(lora_layer_params)
        check_others("Attention", others)
        caches = kv_cache_params or KeyValueCacheParams()
        lengths = attention_params or AttentionParams()
        mask = unwrap(attention_mask)
        by_head = position_embedding is not None and unwrap(position_embedding).ndim == 3
        rows = packed_rows(
            unwrap(hidden_states),
            unwrap(lengths.context_lengths),
            unwrap(lengths.host_request_types),
            unwrap(caches.host_past_key_value_lengths),
        )
        if rows is not None and rows.is_flat:
            hidden_states = wrap(unwrap(hidden_states).unsqueeze(0))
        q, k, v = self._projected(hidden_states, by_head)
        if rows is not None:
            q, k, v = (rows.pad(x) for x in (q, k, v))
            position_ids = None  # counted from the cache
        if self.cross_attention:
            k, v = self._encoded(encoder_output, by_head, cross_kv_cache_gen, cross_kv_reuse)
            found, cache = cross(
                self.heads,
                self._rules(),
                (q, k, v),
                unwrap(lengths.encoder_input_lengths),
                None if dialect() == "A" else mask,  # up to 0.7.1 it is the decoder's
                self._codes(),
            )
            return self._finished(found, cache, use_cache, all_reduce_params)
        plugin = bool(current_network().plugin_config.gpt_attention_plugin) or rows is not None
        past = caches.get_first_past_key_value()
        filled, before = None, 0 if past is None else unwrap(past).shape[3]
        if plugin:
            filled = filled_keys(past, caches.host_past_key_value_lengths)
            before = 0 if filled is None else filled
        queries = query_positions(q.shape[1], before)
        prompt = unwrap(lengths.context_lengths)
        q, k = self._positioned(
            q, k, queries, unwrap(position_embedding), unwrap(position_ids), mrope_params, prompt
        )
        if self.logn:
            q = q * logn_scale(queries, self.logn).cast(q.dtype)
        window = window_of(
            caches.host_max_attention_window_sizes, self.local_layer_idx, self.attention_mask_type
        )
        rules, codes = self._rules(window), self._codes()
        if plugin:
            found, cache = cached(
                self.heads,
                rules,
                (q, k, v),
                past,
                filled,
                codes=codes,
                mask=counted_mask(mask, self.attention_mask_type),
                prompt=prompt,
                use_cache=use_cache,
                packed=rows,
            )
            found = found if rows is None else wrap(rows.unpad(unwrap(found)))
        else:
            grown, keys, values = grow(self.heads, unwrap(past), k, v, codes)
            found = wrap(rules.attend(self.heads, q, keys, values, mask=mask, prompt=prompt))
            cache = wrap(grown)
        return self._finished(found, cache, use_cache, all_reduce_params)

    def _finished(
        self, found: Tensor, cache: Tensor | None, use_cache: bool, params: AllReduceParams | None
    ) -> Any:
        if self.inner_layernorm is not None:
            found = self.inner_layernorm(found)
        out = self.dense(found, all_reduce_params=params)
        return (out, cache) if use_cache else out

    def _encoded(
        self,
        encoder_output: Tensor | None,
        by_head: bool,
        generate: Tensor | None,
        reuse: Tensor | None,
    ) -> tuple[Inner, Inner]:
        """Keys and values [B, T, kv*width] of the encoder's output.

        With `skip_cross_kv` they are `reuse` [B, T, 2*kv*width] where `generate` bool [1] is false;
        unlike TensorRT-LLM, irc computes both.
        """
        if encoder_output is None:
            raise Error("cross attention needs encoder_output, found None", loc=here())
        if self.skip_cross_kv:
            current_session().note(
                "skip_cross_kv: keys and values of the encoder are computed in every call, and "
                "replaced by cross_kv_reuse where cross_kv_cache_gen is false"
            )
        _, k, v = self._projected(encoder_output, by_head)
        if not self.skip_cross_kv or generate is None or reuse is None:
            return k, v
        kept = unwrap(reuse).split(self.heads.sizes[1:], 2)
        chosen = unwrap(generate).reshape(1, 1, 1)
        fresh = chosen if chosen.dtype == "bool" else F.ne(chosen, 0)
        return F.where(fresh, k, kept[0].cast(k.dtype)), F.where(fresh, v, kept[1].cast(v.dtype))

    def _codes(self) -> CacheCodes:
        scale = self.kv_cache_scaling_factor
        return cache_codes(self.quant_mode, None if scale is None else scale.value)
