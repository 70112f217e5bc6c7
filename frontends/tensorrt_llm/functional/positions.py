"""Positions as scripts of TensorRT-LLM use them: rotary embeddings and ALiBi."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np

from ....ops.rope import inverse_frequencies
from ... import functional as F
from ...layers import Rope
from ...models.config_reader import ConfigReader
from ...models.rope_config import scaling_fields
from ...tensor import located
from ..api import api, release
from ..arithmetic import data
from ..enums import PositionEmbeddingType, RotaryScalingType
from ..errors import ScriptError
from ..module import constant_tensor
from ..tensor import shape_of, wrap

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
