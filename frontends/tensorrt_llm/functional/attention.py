"""`gpt_attention` and `bert_attention` as scripts of TensorRT-LLM call them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ....errors import Error
from ....source import here
from ... import functional as F
from ...layers import BlockSparse, RelativePositions
from ...layers.positions import query_positions, rotated
from ...tensor import Tensor as Inner
from ..context import current_session
from ..enums import AttentionMaskType, PositionEmbeddingType, RotaryScalingType
from ..tensor import Tensor, unwrap, wrap
from .attention_arguments import check_others
from .cached_attention import CacheCodes, Heads, Rules, cached, cross, filled_keys
from .packed import packed_rows
from .positions import as_tensor
from .rotary import mrope_angles, rotary, table_angles


def window_of(sizes: Any, layer: int, kind: AttentionMaskType) -> int | Inner:
    """The window of a layer from a number, one per layer, or a tensor i32 [layers]; 0 is none."""
    if isinstance(sizes, (list, tuple)) and sizes:
        return window_of(sizes[layer % len(sizes)], 0, kind)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    causal = (AttentionMaskType.causal, AttentionMaskType.sliding_window_causal)
    if not sizes or kind not in causal:
        return 0
    if isinstance(sizes, int):
        return sizes
    inner = unwrap(sizes)
    size = inner.shape[0]
    at = layer if not isinstance(size, int) or size > layer else layer % size
    return F.slice(inner, 0, at, at + 1).cast("i32")


def counted_mask(mask: Inner | None, kind: AttentionMaskType) -> Inner | None:
    """The mask of attention over a cache of a capacity: only custom_mask has one."""
    if mask is None or kind is AttentionMaskType.custom_mask:
        return mask
    current_session().note(
        f"attention_mask has no effect on {kind} attention with gpt_attention_plugin; padding is "
        "on the right, where no token attends to it"
    )
    return None


def gpt_attention(
    *,
    qkv: Tensor | None = None,
    past_key_value: Tensor | None = None,
    attention_mask: Tensor | None = None,
    host_past_key_value_lengths: Tensor | None = None,
    host_max_attention_window_sizes: Any = None,
    context_lengths: Tensor | None = None,
    host_request_types: Tensor | None = None,
    layer_idx: int = 0,
    num_heads: int,
    num_kv_heads: int,
    hidden_size_per_head: int,
    q_scaling: float = 1.0,
    qk_tanh_scale: float = 0.0,
    attn_logit_softcapping_scale: float = 0.0,
    rotary_embedding_dim: int = 0,
    rotary_embedding_base: float = 10000.0,
    rotary_embedding_scale_type: RotaryScalingType = RotaryScalingType.none,
    rotary_embedding_scale: float = 1.0,
    rotary_embedding_max_positions: int = 1024,
    rotary_embedding_original_max_positions: int = 1024,
    position_embedding_type: PositionEmbeddingType = PositionEmbeddingType.learned_absolute,
    rotary_inv_freq: Any = None,
    rotary_cos_sin: Any = None,
    long_rope_rotary_cos_sin: Any = None,
    kv_quant_orig_scale: Tensor | None = None,
    kv_cache_quant_mode: Any = None,
    mask_type: AttentionMaskType = AttentionMaskType.causal,
    block_sparse_block_size: int = 64,
    block_sparse_homo_head_pattern: bool = False,
    block_sparse_num_local_blocks: int = 16,
    block_sparse_vertical_stride: int = 8,
    alibi_slopes: Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    do_cross_attention: bool = False,
    cross_kv: Tensor | None = None,
    cross_qkv: Tensor | None = None,
    encoder_input_lengths: Tensor | None = None,
    relative_attention_bias: Tensor | None = None,
    max_distance: int = 0,
    logn_scaling: Tensor | None = None,
    qkv_bias: Tensor | None = None,
    use_cache: bool = True,
    mrope_rotary_cos_sin: Tensor | None = None,
    mrope_position_deltas: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """(context [B, S, num_heads*d], present_key_value) of qkv [B, S, (num_heads+2*num_kv_heads)*d].

    `past_key_value` [B, 2, num_kv_heads, capacity, d] holds `host_past_key_value_lengths` i32 [B]
    tokens per row; the new ones are written behind them, and present_key_value is the same memory.
    Rows shorter than S are padded on the right. Unlike TensorRT-LLM's, sequences have padding,
    caches are contiguous, and every mask type is possible.
    """
    check_others("gpt_attention", others)
    if qkv is None:
        raise Error("gpt_attention: expected the argument qkv, found none", loc=here())
    if position_embedding_type.is_alibi() and alibi_slopes is None:
        raise Error(
            f"gpt_attention: {position_embedding_type} needs alibi_slopes, which "
            "generate_alibi_slopes makes; found none",
            loc=here(),
        )
    heads = Heads(num_heads, num_kv_heads, hidden_size_per_head, tp_rank, tp_size)
    x, past = unwrap(qkv), unwrap(host_past_key_value_lengths)
    rows = packed_rows(x, unwrap(context_lengths), unwrap(host_request_types), past)
    x = x if rows is None else rows.pad(x)
    q, k, v = heads.split(x if qkv_bias is None else x + unwrap(qkv_bias).cast(x.dtype))
    lengths = filled_keys(past_key_value, host_past_key_value_lengths)
    rules = Rules(
        mask_type,
        1 / (q_scaling * math.sqrt(hidden_size_per_head)),
        float(attn_logit_softcapping_scale or qk_tanh_scale),
        window_of(host_max_attention_window_sizes, layer_idx, mask_type),
        BlockSparse(
            block_sparse_block_size,
            block_sparse_num_local_blocks,
            block_sparse_vertical_stride,
            block_sparse_homo_head_pattern,
        ),
        None if alibi_slopes is None else as_tensor(alibi_slopes).reshape(num_heads).cast("f32"),
        *relative_rule(relative_attention_bias, max_distance, bidirectional=False),
    )
    codes = cache_codes(kv_cache_quant_mode, kv_quant_orig_scale)
    if do_cross_attention:
        kv = _cross_kv(heads, cross_kv, cross_qkv)
        ends, mask = unwrap(encoder_input_lengths), unwrap(attention_mask)
        return cross(heads, rules, (q, *kv), ends, mask, codes)
    positions = query_positions(q.shape[1], 0 if lengths is None else lengths)
    if logn_scaling is not None:
        scale = F.gather(as_tensor(logn_scaling), positions, dim=0)
        q = q * scale.unsqueeze(2).cast(q.dtype)
    positions = F.expand(positions, q.shape[:2])
    if position_embedding_type.is_rope() and rotary_embedding_dim:
        angles = None
        if mrope_rotary_cos_sin is not None:
            angles = mrope_angles(
                as_tensor(mrope_rotary_cos_sin),
                unwrap(mrope_position_deltas),
                positions,
                unwrap(context_lengths),
                rotary_embedding_base,
                rotary_embedding_dim,
            )
        elif rotary_embedding_scale_type is not RotaryScalingType.dynamic:
            angles = _angles(
                positions,
                rotary_embedding_dim,
                rotary_embedding_original_max_positions,
                (rotary_inv_freq, rotary_cos_sin, long_rope_rotary_cos_sin),
            )
        turn = _rotation(
            angles,
            positions,
            position_embedding_type,
            rotary_embedding_scale_type,
            head_dim=hidden_size_per_head,
            base=rotary_embedding_base,
            scaling={"factor": rotary_embedding_scale},
            percentage=rotary_embedding_dim / hidden_size_per_head,
            max_positions=rotary_embedding_max_positions,
        )
        q, k = turn(q), turn(k)
    context, present = cached(
        heads,
        rules,
        (q, k, v),
        past_key_value,
        lengths,
        codes=codes,
        mask=counted_mask(unwrap(attention_mask), mask_type),
        prompt=unwrap(context_lengths),
        use_cache=use_cache,
        packed=rows,
    )
    return context if rows is None else wrap(rows.unpad(unwrap(context))), present


def _cross_kv(
    heads: Heads, cross_kv: Tensor | None, cross_qkv: Tensor | None
) -> tuple[Inner, Inner]:
    """Keys and values [B, T, kv*width] of the other sequence."""
    if cross_qkv is not None:
        return heads.split(unwrap(cross_qkv))[1:]
    if cross_kv is None:
        raise Error("gpt_attention: cross attention needs cross_kv, found none", loc=here())
    k, v = unwrap(cross_kv).split(heads.sizes[1:], 2)
    return k, v


def _angles(
    positions: Inner, dim: int, original: int, tables: tuple[Any, Any, Any]
) -> tuple[Inner, Inner] | None:
    """cos and sin from tables: inverse frequencies, sines, and sines of long calls."""
    inverse, sines, long = tables
    if sines is None and inverse is None:
        return None
    if sines is None:
        angles = positions.cast("f32").unsqueeze(2) * as_tensor(inverse).reshape(1, 1, dim // 2)
        return F.cos(angles), F.sin(angles)
    found = table_angles(as_tensor(sines), positions, dim)
    if long is None:
        return found
    is_long = F.ge(F.reduce_max(positions, dims=(0, 1)), original)
    other = table_angles(as_tensor(long), positions, dim)
    return F.where(is_long, other[0], found[0]), F.where(is_long, other[1], found[1])


def _rotation(
    angles: tuple[Inner, Inner] | None,
    positions: Inner,
    kind: PositionEmbeddingType,
    scale_type: RotaryScalingType,
    head_dim: int,
    **numbers: Any,
) -> Callable[[Inner], Inner]:
    """The rotation of queries or keys by angles, or by the numbers that `rotary` takes."""
    if angles is not None:
        interleaved = kind is PositionEmbeddingType.rope_gptj
        return lambda x: rotated(x, *angles, head_dim, interleaved)
    if scale_type.name in ("longrope", "llama3", "yarn") or kind.name in ("long_rope", "yarn"):
        raise Error(
            f"gpt_attention: rotary scaling {scale_type} needs rotary_cos_sin, which "
            "RopeEmbeddingUtils.create_sinusoidal_positions_for_attention_plugin makes",
            loc=here(),
        )
    turn = rotary(kind, head_dim, scale_type=scale_type, **numbers)
    return lambda x: turn(x, positions, head_dim)


def relative_rule(
    table: Any, max_distance: int, bidirectional: bool
) -> tuple[RelativePositions | None, Inner | None]:
    """(buckets or None, table) of a table [heads, buckets], or of biases [heads, N, N] where
    `max_distance` is 0."""
    if table is None:
        return None, None
    inner = as_tensor(table)
    inner = inner.squeeze(0) if inner.ndim == 4 else inner
    if not max_distance:
        return None, inner
    buckets = inner.shape[-1]
    if inner.ndim != 2 or not isinstance(buckets, int):
        raise Error(
            "expected a table [heads, buckets] of relative biases with max_distance, found "
            f"{inner.type}",
            loc=here(),
        )
    return RelativePositions(buckets, max_distance, bidirectional), inner


def cache_codes(mode: Any, scale: Any) -> CacheCodes:
    """How a cache of a QuantMode holds keys and values, with the scale of its codes [1]."""
    if mode is None or not mode.has_kv_cache_quant():
        return CacheCodes()
    if scale is None or mode.has_nvfp4_kv_cache():
        raise Error(
            f"a KV cache of {mode!r} is not supported; expected INT8_KV_CACHE or FP8_KV_CACHE, "
            "with its scale",
            loc=here(),
        )
    dtype = "i8" if mode.has_int8_kv_cache() else "f8e4m3"
    return CacheCodes(as_tensor(scale), dtype)


def bert_attention(
    tensor: Tensor,
    input_lengths: Tensor | None,
    num_heads: int,
    head_size: int,
    q_scaling: float = 1.0,
    relative_attention: bool = False,
    relative_attention_bias: Any = None,
    max_distance: int = 0,
    max_input_length: Any = None,
    **others: Any,
) -> Tensor:
    """Attention [B, S, num_heads*head_size] over whole sequences of qkv [B, S, 3*...].

    Row b sees its first `input_lengths[b]` keys. `relative_attention_bias` is the table of this
    rank's heads [heads, buckets], or with max_distance 0 the biases [heads, N, N].
    """
    check_others("bert_attention", others)
    heads = Heads(num_heads, num_heads, head_size)
    biases = relative_attention_bias if relative_attention else None
    rule, table = relative_rule(biases, max_distance, bidirectional=True)
    rules = Rules(
        AttentionMaskType.padding,
        1 / (q_scaling * math.sqrt(head_size)),
        relative=rule,
        table=table,
    )
    qkv = heads.split(unwrap(tensor))
    return wrap(rules.attend(heads, *qkv, lengths=unwrap(input_lengths)))
