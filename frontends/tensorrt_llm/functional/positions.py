"""Positions as scripts of TensorRT-LLM use them: rotary embeddings, ALiBi, relative biases, log-n.

Rotation is irc's `Rope` wherever the settings are numbers. Tables of sines, which scripts may pass
instead, are read by position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np

from ....errors import Error
from ....ops.rope import inverse_frequencies
from ....source import here
from ... import functional as F
from ...layers import RelativePositions, Rope
from ...layers.positions import alibi_slopes, query_positions, rotated
from ...models.config_reader import ConfigReader
from ...models.rope_config import scaling_fields
from ...tensor import Tensor
from ..api import api, release
from ..arithmetic import data
from ..dtypes import irc_dtype
from ..enums import PositionEmbeddingType, RotaryScalingType
from ..tensor import shape_of, wrap

Array = np.ndarray[Any, Any]
_KINDS = {"default": "none", "su": "longrope"}  # names of Hugging Face
_ORIGINAL = {"llama3": 8192, "yarn": 4096}  # the trained length where a config has none
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_DEFAULTS: dict[str, dict[str, Any]] = {"llama3": _LLAMA3}


# -- rotary embeddings


def scaling_type(scaling: Mapping[str, Any] | None) -> RotaryScalingType:
    """The kind that a `rotary_scaling` dict of Hugging Face names."""
    if not scaling:
        return RotaryScalingType.none
    name = scaling.get("rope_type", scaling.get("type"))
    if name is None:
        raise Error(
            f"rotary_scaling: expected the key 'type' or 'rope_type', found {dict(scaling)}",
            loc=here(),
        )
    name = str(getattr(name, "name", name))
    return RotaryScalingType.from_string(_KINDS.get(name, name))  # pyright: ignore[reportReturnType]


def rope_of(
    kind: PositionEmbeddingType,
    head_size: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    scale_type: RotaryScalingType | None = None,
    percentage: float = 1.0,
    max_positions: int = 1024,
    original_positions: int | None = None,
    factors: tuple[Any, Any] = (None, None),
    scales: tuple[float | None, float | None] = (None, None),
) -> Rope:
    """The rotation of a layer with these settings, which are those of `Attention`.

    `factors` are those of short and of long calls, `scales` what multiplies their features.
    """
    table = dict(scaling or {})
    stretch = (scaling_type(table) if scale_type is None else scale_type).name
    if kind is PositionEmbeddingType.yarn and stretch != "yarn":
        raise Error("yarn positions need a rotary_scaling of the type yarn", loc=here())
    original = table.get("original_max_position_embeddings", original_positions)
    if kind is PositionEmbeddingType.long_rope or stretch == "longrope":
        stretch = "longrope"
        names = "short_factor", "long_factor"
        given = [table.get(name, own) for name, own in zip(names, factors, strict=True)]
        table |= {name: each and [*each] for name, each in zip(names, given, strict=True)}
        if None in (*given, original):
            raise Error(
                "long_rope needs rope_scaling_short_factors, rope_scaling_long_factors and "
                "original_max_position_embeddings",
                loc=here(),
            )
        if (scales[0] is None) != (scales[1] is None):
            raise Error(
                "expected both rope_scaling_short_mscale and rope_scaling_long_mscale, or "
                "neither; found one of them",
                loc=here(),
            )
        table["factor"] = max_positions / (original or 1)
        table["attention_factor"] = None if scales[0] is None else 1.0
    elif "original_max_position_embeddings" not in table:
        original = _ORIGINAL.get(stretch, max_positions)
    fields: dict[str, Any] = {}
    if stretch not in ("none", "mrope"):
        reader = ConfigReader({**_DEFAULTS.get(stretch, {}), **table}, "rotary_scaling")
        try:
            fields = {"kind": stretch, **scaling_fields(stretch, reader, max_positions, original)}
        except Error as error:
            raise error.at(loc=here()) from None
    if stretch == "dynamic":
        fields["original_positions"] = original
    is_chatglm = kind is PositionEmbeddingType.chatglm
    return Rope(
        theta=float(base),
        rotary_dim=int(head_size * (0.5 if is_chatglm else percentage)),
        interleaved=kind is PositionEmbeddingType.rope_gptj,
        halves=is_chatglm,
        sections=tuple(table.get("mrope_section", ())),
        scales=None if scales[0] is None else (scales[0], scales[1] or 0.0),
        **fields,
    )


@api("functional.RopeEmbeddingUtils")
@api("layers.attention.RopeEmbeddingUtils")
class RopeEmbeddingUtils:
    """Tables of sines and rotations, for scripts that rotate queries and keys themselves."""

    @staticmethod
    def create_sinusoidal_positions(
        num_pos: int, dim: int, theta: float = 10000.0, dtype: Any = np.float32
    ) -> Array:
        """[1, num_pos, dim]: the sines of all angles, then the cosines."""
        angles = np.arange(num_pos)[:, None] / theta ** (np.arange(0, dim, 2) / dim)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[None].astype(dtype)

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
            scaling={"factor": scale, **(rope_scaling_config or {})},
            scale_type=scale_type,
            max_positions=num_pos,
        )
        attributes: Any = SimpleNamespace(**asdict(rope), turned=dim)
        inverse, factor = inverse_frequencies(attributes)
        angles = np.arange(num_pos)[:, None] * inverse.astype(np.float64)
        pairs = np.stack([np.cos(angles), np.sin(angles)], axis=-1) * factor
        return inverse.astype(dtype), pairs.reshape(1, -1).astype(dtype)

    @staticmethod
    def rotate_every_two(tensor: Any) -> Any:
        """[..., D]: (a, b) of every two features becomes (-b, a)."""
        x = data(tensor)
        a, b = x.reshape(*x.shape[:-1], -1, 2).split(1, -1)
        return wrap(F.concat([-b, a], -1).reshape(*x.shape))

    @staticmethod
    def rotate_half(tensor: Any) -> Any:
        """[..., D]: the halves (a, b) of the features become (-b, a)."""
        return wrap(_turned_half(data(tensor)))

    @staticmethod
    def apply_rotary_pos_emb(
        tensor: Any,
        position_embedding: Sequence[Any],
        pos_emb_type: PositionEmbeddingType = PositionEmbeddingType.rope_gptj,
    ) -> Any:
        """tensor [B, S, heads, D] rotated; `position_embedding` is [cos, sin], each [B, S, D / 2].

        Of chatglm they are cos and sin of the first half of the features, then of the second, in
        the order cos, cos, sin, sin, each [B, S, 1, D / 2].
        """
        pairwise = pos_emb_type is PositionEmbeddingType.rope_gptj
        if pos_emb_type.name not in ("rope_gptj", "rope_gpt_neox", "chatglm"):
            raise Error(f"expected positions that rotate, found {pos_emb_type}", loc=here())
        x, tables = data(tensor), [data(each) for each in position_embedding]
        width: Any = x.shape[-1]
        if pos_emb_type is PositionEmbeddingType.chatglm:
            parts = zip(x.split(width // 2, 3), tables[:2], tables[2:], strict=True)
            return wrap(F.concat([part * c + _turned_half(part) * s for part, c, s in parts], 3))
        cos, sin = tables
        turned = rotated(x.reshape(*x.shape[:2], -1), cos, sin, width, pairwise)
        return wrap(turned.reshape(*x.shape))


def _turned_half(x: Tensor) -> Tensor:
    width: Any = x.shape[-1]
    a, b = x.split(width // 2, -1)
    return F.concat([-b, a], -1)


# -- biases and factors of scores


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
    local = num_heads // tp_size
    if release() < 10:
        slopes = alibi_slopes(num_heads, alibi_bias_max, tp_rank * local, local)
        return wrap((slopes * float(alibi_scale)).reshape(1, local, 1, 1).cast(irc_dtype(dtype)))
    power = 2 ** int(math.log2(num_heads))
    numbers = [
        2 ** (-alibi_bias_max * ((i + 1) / power if i < power else (i - power + 0.5) / power))
        for i in range(tp_rank * local, (tp_rank + 1) * local)
    ]
    return (np.array(numbers, np.float32) * np.float32(alibi_scale)).reshape(1, local, 1, 1)


@api("functional.generate_alibi_biases")
def generate_alibi_biases(slopes: Any, key_length: Any) -> Any:
    """slope * position of the key: f32 [1, heads, 1, key_length], for slopes [1, heads, 1, 1]."""
    (keys,) = shape_of(key_length)
    return wrap(data(slopes).cast("f32") * F.cast(F.iota(keys), "f32").reshape(1, 1, 1, keys))


@api("layers.attention.compute_relative_bias")
def compute_relative_bias(
    query_length: Any,
    key_length: Any,
    num_buckets: int,
    max_distance: int,
    bidirectional: bool,
    rel_attn_table: Any,
) -> Any:
    """The bias of T5 for queries and keys from position 0: f32 [1, heads, queries, keys].

    `rel_attn_table` [num_buckets, heads] holds the heads of this rank, and each rank gets the
    biases of its own heads.
    """
    (queries,), (keys,) = shape_of(query_length), shape_of(key_length)
    rule = RelativePositions(num_buckets, max_distance, bidirectional)
    return wrap(rule.bias(data(rel_attn_table).permute(1, 0), query_positions(queries), keys))


@api("functional.generate_logn_scaling")
def generate_logn_scaling(seq_length: int = 8192, max_position_embeddings: int = 32768) -> Array:
    """log(n) / log(seq_length) for n up to `max_position_embeddings`, at least 1: f32 [n]."""
    numbers = np.log(np.arange(1, max_position_embeddings + 1)) / math.log(seq_length)
    return np.maximum(numbers, 1.0).astype(np.float32)


@api("layers.attention.make_causal_mask")
def make_causal_mask(bsz: Any, tgt_len: Any, past_key_values_length: Any, dtype: Any) -> Any:
    """A bias [bsz, 1, tgt_len, past + tgt_len]: 0 for keys up to the query, else -infinity."""
    (batch,), (tokens,) = shape_of(bsz), shape_of(tgt_len)
    (past,) = shape_of(past_key_values_length)
    keys = past + tokens
    query = query_positions(tokens, past).reshape(1, 1, tokens, 1)
    seen = F.le(F.iota(keys).reshape(1, 1, 1, keys), query)
    bias = F.where(seen, F.full(0.0), F.full(float("-inf"))).cast(irc_dtype(dtype))
    return wrap(F.expand(bias, (batch, 1, tokens, keys)))
