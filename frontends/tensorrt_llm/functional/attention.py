"""`gpt_attention` and `bert_attention`, and the one function that computes all attention.

What each AttentionMaskType lets the query at position p see:

| type | visible keys |
|---|---|
| padding | all |
| causal, sliding_window_causal | up to p, and with a window the last ones of that number |
| bidirectional, bidirectionalglm | all of the prompt but its last, and those up to p |
| blocksparse | up to p, in the blocks of `BlockSparse` |
| custom_mask | those of attention_mask |

Without the attention plugin `attention_mask` hides keys of every type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ....errors import Error
from ....source import here
from ... import functional as F
from ...layers import BlockSparse, RelativePositions, Rope
from ...layers.caches import CacheQuantization, Heads, grow, write
from ...layers.masks import key_mask
from ...layers.positions import query_positions, rotated, size_tensor
from ...layers.rope import mrope_angles, table_angles
from ...layers.scores import attend
from ...tensor import Tensor
from ..api import api
from ..arithmetic import unwrapped
from ..context import current_network, current_session
from ..enums import AttentionMaskType, PositionEmbeddingType, RotaryScalingType
from ..tensor import wrap
from .packed import PackedRows, packed_rows
from .positions import rope_of

_BY_TABLE = ("longrope", "long_rope", "llama3", "yarn")  # kinds that need more than a factor
_CAUSAL = (AttentionMaskType.causal, AttentionMaskType.sliding_window_causal)


@dataclass(frozen=True)
class AttentionSettings:
    """What attention computes: its heads, visible keys, scores, and the form of its cache.

    `slopes` are those of ALiBi. `table` has the relative biases of the buckets of `relative`, or
    of query and key positions.
    """

    heads: Heads
    mask_type: AttentionMaskType = AttentionMaskType.causal
    scale: float | None = None
    softcap: float = 0.0
    block_sparse: BlockSparse | None = None
    slopes: Tensor | None = None
    relative: RelativePositions | None = None
    table: Tensor | None = None
    codes: CacheQuantization = field(default_factory=CacheQuantization)


def attend_with(
    settings: AttentionSettings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    past: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    prompt: Tensor | None = None,
    window: int | Tensor = 0,
) -> Tensor:
    """Attention of q over tokens or caches k and v: [B, S, query_heads * head_size].

    `prompt` i32 [B] is the length of the prompts, by default all keys.
    """
    kind, heads = settings.mask_type, settings.heads
    keys = k.shape[2 if k.ndim == 4 else 1]
    if kind is AttentionMaskType.sliding_window_causal and isinstance(window, int) and window < 1:
        raise Error(
            "sliding_window_causal attention needs its window: give "
            "host_max_attention_window_sizes, the number of keys per layer",
            loc=here(),
        )
    if kind is AttentionMaskType.custom_mask and mask is None:
        raise Error("custom_mask attention needs attention_mask", loc=here())
    prefix = None
    if kind.name.startswith("bidirectional"):
        prefix = (size_tensor(keys) if prompt is None else prompt) - 1
    sparse = settings.block_sparse or BlockSparse()
    return attend(
        q,
        k,
        v,
        heads.head_size,
        past=past,
        lengths=lengths if kind is AttentionMaskType.padding else None,
        mask=None if mask is None else key_mask(mask, keys),
        bias=None if bias is None else bias.cast("f32"),
        causal=kind in _CAUSAL,
        window=window if kind in _CAUSAL else 0,
        scale=settings.scale,
        softcap=settings.softcap,
        slopes=settings.slopes,
        relative=settings.relative,
        table=settings.table,
        prefix=prefix,
        block_sparse=sparse if kind is AttentionMaskType.blocksparse else None,
        heads=heads.query_heads * heads.tp_size,
        first=heads.query_heads * heads.tp_rank,
    )


def run_attention(
    settings: AttentionSettings,
    qkv: tuple[Tensor, Tensor, Tensor],
    past: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    prompt: Tensor | None = None,
    window: int | Tensor = 0,
    use_cache: bool = True,
    packed: PackedRows | None = None,
) -> tuple[Tensor, Any]:
    """(context, cache) over a cache of a capacity, of which the first `lengths` keys are filled.

    `prompt` i32 [B] are the lengths of the prompts. Without a cache, over the tokens of the call;
    then the returned cache holds them. A cache that is an input is overwritten. The context of
    `packed` rows is packed.
    """
    q, k, v = qkv
    heads, codes = settings.heads, settings.codes
    if mask is not None and settings.mask_type is not AttentionMaskType.custom_mask:
        current_session().note(
            f"attention_mask has no effect on {settings.mask_type} attention with "
            "gpt_attention_plugin; padding is on the right, where no token attends to it"
        )
        mask = None
    seen: dict[str, Any] = {"mask": mask, "prompt": prompt, "window": window}
    if past is None or lengths is None:
        context = attend_with(settings, q, k, v, lengths=prompt, **seen)
        context = context if packed is None else packed.unpad(context)
        return context, grow(heads, None, k, v, codes)[0] if use_cache else None
    held = past if packed is None else packed.with_room(past)
    cache, keys, values = write(heads, held, lengths, k, v, codes)
    cache = cache if packed is None else F.slice(cache, 3, 0, past.shape[3])
    filled = None
    if settings.mask_type is AttentionMaskType.padding and prompt is None:
        filled = lengths + size_tensor(q.shape[1])
    elif settings.mask_type is AttentionMaskType.padding and prompt is not None:
        filled = F.maximum(prompt, lengths + 1)  # the padding behind the prompts is no key
    context = attend_with(settings, q, keys, values, past=lengths, lengths=filled, **seen)
    context = context if packed is None else packed.unpad(context)
    present = wrap(cache)
    if past.value.owner is current_network().function:
        present.reuses = past.value.name or ""
    return context, present


def run_cross_attention(
    settings: AttentionSettings,
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    lengths: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(context, cache [B, 2, kv_heads, T, head_size]) of queries over another sequence's keys.

    `lengths` i32 [B] are the lengths of that sequence.
    """
    settings = replace(settings, mask_type=AttentionMaskType.padding)
    for other in (*kv, lengths, mask):  # inputs may call the rows by different names
        if other is not None:
            current_network().unify(q.shape[0], other.shape[0], named=True)
    cache, keys, values = grow(settings.heads, None, *kv, settings.codes)
    return attend_with(settings, q, keys, values, lengths=lengths, mask=mask), cache


def window_of(sizes: Any, layer: int) -> int | Tensor:
    """The window of a layer from a number, one per layer, or i32 [layers]; 0 is none."""
    if isinstance(sizes, (list, tuple)):
        windows = cast("list[Any]", sizes)
        return window_of(windows[layer % len(windows)], 0) if windows else 0
    if sizes is None or isinstance(sizes, int):
        return sizes or 0
    tensor: Tensor = unwrapped(sizes)
    size = tensor.shape[0]
    at = layer % size if isinstance(size, int) else layer
    return F.slice(tensor, 0, at, at + 1).cast("i32")


def filled_keys(past: Any, lengths: Any) -> Tensor | None:
    """How many keys of a cache of a capacity are filled: i32 [B], None without a cache."""
    if past is not None and lengths is None:
        raise Error("a KV cache needs host_past_key_value_lengths i32 [batch]", loc=here())
    return None if past is None else unwrapped(lengths)


def relative_rule(table: Tensor | None, max_distance: int, bidirectional: bool) -> dict[str, Any]:
    """`relative` and `table` of AttentionSettings from a table [heads, buckets], or from biases
    [heads, N, N] where `max_distance` is 0."""
    if table is None:
        return {}
    table = table.squeeze(0) if table.ndim == 4 else table
    if not max_distance:
        return {"table": table}
    buckets = table.shape[-1]
    if table.ndim != 2 or not isinstance(buckets, int):
        raise Error(
            "expected a table [heads, buckets] of relative biases with max_distance, found "
            f"{table.type}",
            loc=here(),
        )
    return {"table": table, "relative": RelativePositions(buckets, max_distance, bidirectional)}


def cache_codes(mode: Any, scale: Tensor | None) -> CacheQuantization:
    """How a cache of a QuantMode holds keys and values, with the scale of its codes [1]."""
    if mode is None or not mode.has_kv_cache_quant():
        return CacheQuantization()
    if scale is None:
        raise Error(
            f"a KV cache of {mode!r} is not supported; expected INT8_KV_CACHE or FP8_KV_CACHE, "
            "with its scale",
            loc=here(),
        )
    return CacheQuantization(scale, "i8" if mode.has_int8_kv_cache() else "f8e4m3")


# -- what scripts call


@api("functional.gpt_attention", inner=True)
def gpt_attention(
    num_heads: int, num_kv_heads: int, hidden_size_per_head: int, qkv: Any = None,
    tensor: Any = None, past_key_value: Any = None, attention_mask: Any = None,
    context_fmha_custom_mask: Any = None, host_past_key_value_lengths: Any = None,
    host_max_attention_window_sizes: Any = None, host_max_kv_cache_lengths: Any = None,
    context_lengths: Any = None, host_request_types: Any = None, layer_idx: int = 0,
    q_scaling: float = 1.0,
    qk_tanh_scale: float = 0.0, attn_logit_softcapping_scale: float = 0.0,
    rotary_embedding_dim: int = 0, rotary_embedding_base: float = 10000.0,
    rotary_embedding_scale_type: RotaryScalingType = RotaryScalingType.none,
    rotary_embedding_scale: float = 1.0, rotary_embedding_max_positions: int = 1024,
    rotary_embedding_original_max_positions: int = 1024,
    position_embedding_type: PositionEmbeddingType = PositionEmbeddingType.learned_absolute,
    rotary_inv_freq: Any = None, rotary_cos_sin: Any = None, long_rope_rotary_cos_sin: Any = None,
    kv_quant_orig_scale: Any = None, kv_cache_quant_mode: Any = None,
    mask_type: AttentionMaskType = AttentionMaskType.causal, block_sparse_block_size: int = 64,
    block_sparse_homo_head_pattern: bool = False, block_sparse_num_local_blocks: int = 16,
    block_sparse_vertical_stride: int = 8, alibi_slopes: Any = None, tp_size: int = 1,
    tp_rank: int = 0, do_cross_attention: bool = False, cross_kv: Any = None,
    cross_qkv: Any = None, encoder_input_lengths: Any = None, relative_attention_bias: Any = None,
    max_distance: int = 0, logn_scaling: Any = None, qkv_bias: Any = None, use_cache: bool = True,
    mrope_rotary_sin_cos: Any = None, mrope_position_deltas: Any = None,
) -> Any:  # fmt: skip
    """(context [B, S, num_heads*d], present_key_value) of qkv [B, S, (num_heads+2*num_kv_heads)*d].

    `past_key_value` [B, 2, num_kv_heads, capacity, d] holds `host_past_key_value_lengths` i32 [B]
    tokens per row; the new ones are written behind them, and present_key_value is the same memory.
    Rows shorter than S are padded on the right. Every mask type is possible.
    """
    x: Any = tensor if qkv is None else qkv
    if x is None:
        raise Error("gpt_attention needs qkv, found none", loc=here())
    rows = packed_rows(x, context_lengths, host_request_types, host_past_key_value_lengths)
    padded: Any = x if rows is None else rows.pad(x)
    kind = position_embedding_type
    angles: Any = None
    if kind.is_alibi() and alibi_slopes is None:
        raise Error(
            f"gpt_attention: {kind} needs alibi_slopes, which generate_alibi_slopes makes; found "
            "none",
            loc=here(),
        )
    heads = Heads(num_heads, num_kv_heads, hidden_size_per_head, tp_rank, tp_size)
    q, k, v = heads.split(padded if qkv_bias is None else padded + qkv_bias.cast(x.dtype))
    settings = AttentionSettings(
        heads,
        mask_type,
        1 / (q_scaling * math.sqrt(hidden_size_per_head)),
        float(attn_logit_softcapping_scale or qk_tanh_scale),
        BlockSparse(
            block_sparse_block_size,
            block_sparse_num_local_blocks,
            block_sparse_vertical_stride,
            block_sparse_homo_head_pattern,
        ),
        None if alibi_slopes is None else alibi_slopes.reshape(num_heads).cast("f32"),
        codes=cache_codes(kv_cache_quant_mode, kv_quant_orig_scale),
        **relative_rule(relative_attention_bias, max_distance, bidirectional=False),
    )
    mask = context_fmha_custom_mask if attention_mask is None else attention_mask
    if do_cross_attention:
        if cross_qkv is None and cross_kv is None:
            raise Error("gpt_attention: cross attention needs cross_kv, found none", loc=here())
        other: Any = cross_qkv if cross_kv is None else cross_kv
        k, v = heads.split(other)[1:] if cross_kv is None else other.split(heads.sizes[1:], 2)
        return run_cross_attention(settings, q, (k, v), encoder_input_lengths, mask)
    lengths = filled_keys(past_key_value, host_past_key_value_lengths)
    queries = query_positions(q.shape[1], 0 if lengths is None else lengths)
    if logn_scaling is not None:
        factors = F.gather(logn_scaling, queries, dim=0).unsqueeze(2)
        q = q * factors.cast(q.dtype)
    queries = F.expand(queries, q.shape[:2])
    if mrope_rotary_sin_cos is not None:
        rope = Rope(rotary_embedding_base, rotary_dim=rotary_embedding_dim)
        given = mrope_rotary_sin_cos, mrope_position_deltas
        angles = mrope_angles(*given, queries, context_lengths, rope)
    elif rotary_cos_sin is not None:
        angles = table_angles(rotary_cos_sin, queries, rotary_embedding_dim)
        if long_rope_rotary_cos_sin is not None:
            last = F.reduce_max(queries, dims=(0, 1))
            is_long = F.ge(last, rotary_embedding_original_max_positions)
            long = table_angles(long_rope_rotary_cos_sin, queries, rotary_embedding_dim)
            angles = tuple(F.where(is_long, *pair) for pair in zip(long, angles, strict=True))
    elif rotary_inv_freq is not None:
        radians = queries.cast("f32").unsqueeze(2) * rotary_inv_freq.reshape(1, 1, -1)
        angles = F.cos(radians), F.sin(radians)
    if kind.is_rope() and rotary_embedding_dim:
        if angles is not None and rotary_embedding_scale_type is not RotaryScalingType.dynamic:
            pairwise = kind is PositionEmbeddingType.rope_gptj
            cos, sin = angles
            q, k = (rotated(each, cos, sin, hidden_size_per_head, pairwise) for each in (q, k))
        else:
            if rotary_embedding_scale_type.name in _BY_TABLE or kind.name in _BY_TABLE:
                raise Error(
                    f"gpt_attention: rotary scaling {rotary_embedding_scale_type} of {kind} needs "
                    "rotary_cos_sin, which RopeEmbeddingUtils."
                    "create_sinusoidal_positions_for_attention_plugin makes",
                    loc=here(),
                )
            rope = rope_of(
                kind,
                hidden_size_per_head,
                base=rotary_embedding_base,
                scaling={"factor": rotary_embedding_scale},
                scale_type=rotary_embedding_scale_type,
                percentage=rotary_embedding_dim / hidden_size_per_head,
                max_positions=rotary_embedding_max_positions,
            )
            q, k = (rope(each, queries, hidden_size_per_head) for each in (q, k))
    windows = host_max_attention_window_sizes
    windows = host_max_kv_cache_lengths if windows is None else windows
    return run_attention(
        settings,
        (q, k, v),
        past_key_value,
        lengths,
        mask=mask,
        prompt=context_lengths,
        window=window_of(windows, layer_idx),
        use_cache=use_cache,
        packed=rows,
    )


@api("functional.bert_attention", inner=True)
def bert_attention(
    tensor: Any,
    input_lengths: Any,
    num_heads: int,
    head_size: int,
    q_scaling: float = 1.0,
    relative_attention: bool = False,
    relative_attention_bias: Any = None,
    max_distance: int = 0,
) -> Any:
    """Attention [B, S, num_heads*head_size] over whole sequences of qkv [B, S, 3*...].

    Row b sees its first `input_lengths[b]` keys. `relative_attention_bias` is the table of this
    rank's heads [heads, buckets], or with max_distance 0 the biases [heads, N, N].
    """
    heads = Heads(num_heads, num_heads, head_size)
    table = relative_attention_bias if relative_attention else None
    settings = AttentionSettings(
        heads,
        AttentionMaskType.padding,
        1 / (q_scaling * math.sqrt(head_size)),
        **relative_rule(table, max_distance, bidirectional=True),
    )
    return attend_with(settings, *heads.split(tensor), lengths=input_lengths)
