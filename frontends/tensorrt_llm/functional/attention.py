"""`gpt_attention` and `bert_attention`, the one function that computes attention, and positions.

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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ....ops.rope import inverse_frequencies
from ... import functional as F
from ...layers import BlockSparse, RelativePositions, Rope
from ...layers.caches import CacheQuantization, Heads, grow, write
from ...layers.masks import key_mask
from ...layers.packed import PackedRows, packed_rows
from ...layers.positions import logn_scale, query_positions, rotated, size_tensor
from ...layers.rope import table_angles
from ...layers.scores import attend
from ...models.config_reader import ConfigReader
from ...models.rope_config import scaling_fields
from ...tensor import Tensor, located
from ..api import api, fields, release
from ..arithmetic import data, unwrapped
from ..context import current_network, current_session
from ..enums import AttentionMaskType, PositionEmbeddingType, RotaryScalingType
from ..errors import ScriptError
from ..module import constant_tensor
from ..tensor import shape_of, wrap

Rotation = Callable[[Tensor, Tensor], Tensor]  # (x [B, S, features], positions i32 [B, S])
_BY_TABLE = ("longrope", "long_rope", "llama3", "yarn")  # kinds that need more than a factor
_CAUSAL = (AttentionMaskType.causal, AttentionMaskType.sliding_window_causal)


@dataclass(frozen=True)
class AttentionSettings:
    """What attention computes: its heads, positions, visible keys, scores, and form of its cache.

    `logn` is the length from which queries grow, `slopes` are those of ALiBi. `table` has the
    relative biases of the buckets of `relative`, or of query and key positions.
    """

    heads: Heads
    mask_type: AttentionMaskType = AttentionMaskType.causal
    q_scaling: float = 1.0
    softcap: float = 0.0
    block_sparse: BlockSparse | None = None
    rotation: Rotation | None = None
    logn: int = 0
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
        raise ScriptError(
            "sliding_window_causal attention needs its window: give "
            "host_max_attention_window_sizes, the number of keys per layer"
        )
    if kind is AttentionMaskType.custom_mask and mask is None:
        raise ScriptError("custom_mask attention needs attention_mask")
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
        scale=1 / (settings.q_scaling * math.sqrt(heads.head_size)),
        softcap=settings.softcap,
        slopes=settings.slopes,
        relative=settings.relative,
        table=settings.table,
        prefix=prefix,
        block_sparse=sparse if kind is AttentionMaskType.blocksparse else None,
        heads=heads.query_heads * heads.tp_size,
        first=heads.query_heads * heads.tp_rank,
    )


def self_attention(
    settings: AttentionSettings,
    qkv: tuple[Tensor, Tensor, Tensor],
    past: Tensor | None = None,
    filled: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    prompt: Tensor | None = None,
    window: int | Tensor = 0,
    packed: PackedRows | None = None,
    plugin: bool = True,
) -> tuple[Tensor, Any]:
    """(context, cache) over the tokens of earlier calls, which the cache `past` has, and of this.

    With the plugin the cache has a capacity, of which the first `filled` i32 [B] keys are filled;
    one that is an input is overwritten. Without it the cache grows by the tokens of the call.
    `prompt` i32 [B] are the lengths of the prompts, `positions` i32 [B, S] by default counted from
    the cache. The context of `packed` rows is packed.
    """
    (q, k, v), kind = qkv, settings.mask_type
    heads, codes = settings.heads, settings.codes
    if plugin and past is not None and filled is None:
        raise ScriptError("a KV cache needs host_past_key_value_lengths i32 [batch]")
    if plugin and mask is not None and kind is not AttentionMaskType.custom_mask:
        current_session().note(
            f"attention_mask has no effect on {kind} attention with gpt_attention_plugin; "
            "padding is on the right, where no token attends to it"
        )
        mask = None
    unify_rows(q, past, filled, prompt)
    before = 0 if past is None else filled if plugin else past.shape[3]
    queries = query_positions(q.shape[1], cast("Any", before))
    if settings.rotation is not None:
        positions = F.expand(queries, q.shape[:2]) if positions is None else positions
        q, k = settings.rotation(q, positions), settings.rotation(k, positions)
    if settings.logn:
        q = q * logn_scale(queries, settings.logn).cast(q.dtype)
    seen: dict[str, Any] = {"mask": mask, "prompt": prompt, "window": window}
    if not plugin:
        cache, k, v = grow(heads, past, k, v, codes)
        return attend_with(settings, q, k, v, **seen), cache
    if past is None or filled is None:
        context = attend_with(settings, q, k, v, lengths=prompt, **seen)
        present: Any = grow(heads, None, k, v, codes)[0]
    else:
        held = past if packed is None else packed.with_room(past)
        cache, keys, values = write(heads, held, filled, k, v, codes)
        cache = cache if packed is None else F.slice(cache, 3, 0, past.shape[3])
        ends = None
        if kind is AttentionMaskType.padding:  # the padding behind the prompts is no key
            end = filled + size_tensor(q.shape[1])
            ends = end if prompt is None else F.maximum(prompt, filled + 1)
        context = attend_with(settings, q, keys, values, past=filled, lengths=ends, **seen)
        present = wrap(cache)
        if past.value.owner is current_network().function:
            present.reuses = past.value.name or ""
    return context if packed is None else packed.unpad(context), present


def unify_rows(x: Tensor, *others: Tensor | None) -> None:
    """Take the first sizes of tensors for one: inputs may call the rows by different names."""
    for other in others:
        if other is not None:
            current_network().unify(x.shape[0], other.shape[0], named=True)


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


def filled_keys(lengths: Tensor | None, request_types: Tensor | None) -> Tensor | None:
    """How many keys of a cache are filled, i32 [B]: none where the request type is 0, a prompt."""
    if lengths is None or request_types is None:
        return lengths
    return F.where(F.gt(request_types, 0), lengths, F.full(0, dtype="i32"))


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
        raise ScriptError(
            "expected a table [heads, buckets] of relative biases with max_distance, found "
            f"{table.type}"
        )
    return {"table": table, "relative": RelativePositions(buckets, max_distance, bidirectional)}


def cache_codes(mode: Any, scale: Tensor | None) -> CacheQuantization:
    """How a cache of a QuantMode holds keys and values, with the scale of its codes [1]."""
    if mode is None or not mode.has_kv_cache_quant():
        return CacheQuantization()
    if scale is None:
        raise ScriptError(
            f"a KV cache of {mode!r} is not supported; expected INT8_KV_CACHE or FP8_KV_CACHE, "
            "with its scale"
        )
    return CacheQuantization(scale, "i8" if mode.has_int8_kv_cache() else "f8e4m3")


# -- what scripts call


@api("functional.gpt_attention", inner=True)
def gpt_attention(
    num_heads: int,
    num_kv_heads: int,
    hidden_size_per_head: int,
    q_scaling: float = 1.0,
    qkv: Any = None,
    past_key_value: Any = None,
    use_cache: bool = True,
    **arguments: Any,
) -> Any:
    """(context [B, S, num_heads*d], present_key_value) of qkv [B, S, (num_heads+2*num_kv_heads)*d].

    `past_key_value` [B, 2, num_kv_heads, capacity, d] holds `host_past_key_value_lengths` i32 [B]
    tokens per row; the new ones are written behind them, and present_key_value is the same memory.
    Rows shorter than S are padded on the right. Every mask type is possible.
    """
    given = SimpleNamespace(**fields("functional.gpt_attention", every=True) | arguments)
    x: Any = given.tensor if qkv is None else qkv
    if x is None:
        raise ScriptError("gpt_attention needs qkv, found none")
    kind = given.position_embedding_type or PositionEmbeddingType.learned_absolute
    if kind.is_alibi() and given.alibi_slopes is None:
        raise ScriptError(
            f"gpt_attention: {kind} needs alibi_slopes, which generate_alibi_slopes makes; found "
            "none"
        )
    prompt, types = given.context_lengths, given.host_request_types
    filled = filled_keys(given.host_past_key_value_lengths, types)
    rows = packed_rows(x, prompt, types, filled)
    padded: Any = x if rows is None else rows.pad(x)
    bias, slopes, mask_type = given.qkv_bias, given.alibi_slopes, given.mask_type
    heads = Heads(num_heads, num_kv_heads, hidden_size_per_head, given.tp_rank, given.tp_size)
    settings = AttentionSettings(
        heads,
        AttentionMaskType.causal if mask_type is None else mask_type,
        q_scaling,
        float(given.attn_logit_softcapping_scale or given.qk_tanh_scale),
        BlockSparse(
            given.block_sparse_block_size,
            given.block_sparse_num_local_blocks,
            given.block_sparse_vertical_stride,
            given.block_sparse_homo_head_pattern,
        ),
        _rotation(kind, hidden_size_per_head, given),
        slopes=None if slopes is None else slopes.reshape(num_heads).cast("f32"),
        codes=cache_codes(given.kv_cache_quant_mode, given.kv_quant_orig_scale),
        **relative_rule(given.relative_attention_bias, given.max_distance, bidirectional=False),
    )
    mask, windows = given.attention_mask, given.host_max_attention_window_sizes
    context, present = self_attention(
        settings,
        heads.split(padded if bias is None else padded + bias.cast(x.dtype)),
        past_key_value,
        filled,
        mask=given.context_fmha_custom_mask if mask is None else mask,
        prompt=prompt,
        window=window_of(
            given.host_max_kv_cache_lengths if windows is None else windows, given.layer_idx or 0
        ),
        packed=rows,
    )
    return context, present if use_cache or past_key_value is not None else None


def _rotation(
    kind: PositionEmbeddingType, head_size: int, given: SimpleNamespace
) -> Rotation | None:
    """The rotation by arguments of gpt_attention: by a table of angles, or by numbers."""
    dim, table, inverse = given.rotary_embedding_dim, given.rotary_cos_sin, given.rotary_inv_freq
    stretch = given.rotary_embedding_scale_type or RotaryScalingType.none
    if not kind.is_rope() or not dim:
        return None
    if (table is None and inverse is None) or stretch is RotaryScalingType.dynamic:
        if stretch.name in _BY_TABLE or kind.name in _BY_TABLE:
            raise ScriptError(
                f"gpt_attention: rotary scaling {stretch} of {kind} needs rotary_cos_sin, which "
                "RopeEmbeddingUtils.create_sinusoidal_positions_for_attention_plugin makes"
            )
        rope = rope_of(
            kind,
            head_size,
            base=given.rotary_embedding_base,
            scaling={"type": stretch, "factor": given.rotary_embedding_scale},
            percentage=dim / head_size,
            max_positions=given.rotary_embedding_max_positions,
        )
        return lambda x, positions: rope(x, positions, head_size)

    def rotation(x: Tensor, positions: Tensor) -> Tensor:
        if table is None:
            radians = positions.cast("f32").unsqueeze(2) * inverse.reshape(1, 1, -1)
            cos, sin = F.cos(radians), F.sin(radians)
        else:
            cos, sin = table_angles(table, positions, dim)
        return rotated(x, cos, sin, head_size, kind is PositionEmbeddingType.rope_gptj)

    return rotation


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
    rule = relative_rule(
        relative_attention_bias if relative_attention else None, max_distance, bidirectional=True
    )
    settings = AttentionSettings(heads, AttentionMaskType.padding, q_scaling, **rule)
    return attend_with(settings, *heads.split(tensor), lengths=input_lengths)


# -- positions


Array = np.ndarray[Any, Any]
_KINDS = {"default": "none", "su": "longrope"}  # names of Hugging Face
_ORIGINAL = {"llama3": 8192, "yarn": 4096}  # the trained length where a config has none
_DEFAULTS = {"llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}


def scaling_type(scaling: Mapping[str, Any] | None) -> RotaryScalingType:
    """The kind that a `rotary_scaling` dict of Hugging Face names."""
    if not scaling:
        return RotaryScalingType.none
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None:
        raise ScriptError(
            f"rotary_scaling: expected the key 'type' or 'rope_type', found {dict(scaling)}"
        )
    name = str(getattr(kind, "name", kind))
    return RotaryScalingType.from_string(_KINDS.get(name, name))  # pyright: ignore[reportReturnType]


def rope_of(
    kind: PositionEmbeddingType,
    head_size: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    percentage: float = 1.0,
    max_positions: int = 1024,
    original_positions: int | None = None,
    factors: tuple[Any, Any] = (None, None),
) -> Rope:
    """The rotation of a layer with these settings, which are those of `Attention`.

    `factors` of frequencies are those of short and of long calls.
    """
    settings, stretch = dict(scaling or {}), scaling_type(scaling).name
    if "mrope" in (kind.name, stretch):
        raise ScriptError("mrope positions, of images and videos, are not supported")
    if kind is PositionEmbeddingType.yarn and stretch != "yarn":
        raise ScriptError("yarn positions need a rotary_scaling of the type yarn")
    original = settings.get("original_max_position_embeddings", original_positions)
    if kind is PositionEmbeddingType.long_rope or stretch == "longrope":
        stretch = "longrope"
        for name, own in zip(("short_factor", "long_factor"), factors, strict=True):
            factor = settings.get(name, own)
            settings[name] = factor and [*factor]
        if None in (settings["short_factor"], settings["long_factor"], original):
            raise ScriptError(
                "long_rope needs rope_scaling_short_factors, rope_scaling_long_factors and "
                "original_max_position_embeddings"
            )
        settings["factor"] = max_positions / (original or 1)
        settings["attention_factor"] = None
    elif "original_max_position_embeddings" not in settings:
        original = _ORIGINAL.get(stretch, max_positions)
    fields: dict[str, Any] = {}
    if stretch != "none":
        reader = ConfigReader(_DEFAULTS.get(stretch, {}) | settings, "rotary_scaling")
        context = original if stretch == "dynamic" else max_positions
        stretched = located(scaling_fields, stretch, reader, context, original)
        fields = {"kind": stretch, **stretched}
    return Rope(
        theta=float(base),
        rotary_dim=int(head_size * percentage),
        interleaved=kind is PositionEmbeddingType.rope_gptj,
        **fields,
    )


@api("functional.RopeEmbeddingUtils")
class RopeEmbeddingUtils:
    """Tables of angles, for scripts that give them to gpt_attention."""

    @staticmethod
    def create_sinusoidal_positions_for_attention_plugin(
        num_pos: int,
        dim: int,
        theta: float = 10000.0,
        scale: float = 1.0,
        scale_type: RotaryScalingType = RotaryScalingType.none,
        rope_scaling_config: Mapping[str, Any] | None = None,
        dtype: Any = np.float32,
    ) -> tuple[Array, Array]:
        """(inverse frequencies [dim / 2], [1, num_pos * dim] of [cos, sin] per pair)."""
        rope = rope_of(
            PositionEmbeddingType.rope_gpt_neox,
            dim,
            base=theta,
            scaling={"factor": scale, **(rope_scaling_config or {}), "rope_type": scale_type},
            max_positions=num_pos,
        )
        attributes: Any = SimpleNamespace(**asdict(rope), turned=dim)
        inverse, factor = inverse_frequencies(attributes)
        angles = np.arange(num_pos)[:, None] * inverse.astype(np.float64)
        pairs = np.stack([np.cos(angles), np.sin(angles)], axis=-1) * factor
        return inverse.astype(dtype), pairs.reshape(1, -1).astype(dtype)


@api("functional.generate_alibi_slopes")
def generate_alibi_slopes(
    num_heads: int,
    dtype: Any = "float32",
    tp_size: int = 1,
    tp_rank: int = 0,
    alibi_scale: float = 1.0,
    alibi_bias_max: int = 8,
) -> Any:
    """The slopes of this rank's heads times `alibi_scale`, [1, num_heads/tp_size, 1, 1].

    A Tensor up to 0.9; later an array of numpy, of which scripts make a Parameter.
    """
    local, power = num_heads // tp_size, 2 ** int(math.log2(num_heads))
    slopes = [
        2 ** (-alibi_bias_max * ((i + 1) / power if i < power else (i - power + 0.5) / power))
        for i in range(tp_rank * local, (tp_rank + 1) * local)
    ]
    array = (np.array(slopes, np.float32) * np.float32(alibi_scale)).reshape(1, local, 1, 1)
    return array if release() >= 10 else constant_tensor(array, dtype)


@api("functional.generate_alibi_biases")
def generate_alibi_biases(slopes: Any, key_length: Any) -> Any:
    """slope * position of the key: f32 [1, heads, 1, key_length], for slopes [1, heads, 1, 1]."""
    (keys,) = shape_of(key_length)
    return wrap(data(slopes).cast("f32") * F.cast(F.iota(keys), "f32").reshape(1, 1, 1, keys))
