"""Rotary embeddings as scripts of TensorRT-LLM use them.

Rotation is the operation `rope` wherever the settings are numbers. Tables of sines, which scripts
may pass instead, are read by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from ....errors import Error
from ....ops.rope import inverse_frequencies
from ....source import here
from ... import functional as F
from ...layers import Rope
from ...layers.positions import rotated
from ...tensor import Tensor as Inner
from ..enums import PositionEmbeddingType, RotaryScalingType
from ..tensor import Tensor, unwrap, wrap

Array = np.ndarray[Any, Any]
_KINDS = {"default": "none", "su": "longrope"}  # names of Hugging Face


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


@dataclass(frozen=True)
class Rotary:
    """The rotation of one attention layer.

    `mscales` multiply the rotated features of short and of long calls (long_rope). `sections` are
    the pairs that each of the position dimensions of mrope rotates.
    """

    rope: Rope
    mscales: tuple[float, float] = (1.0, 1.0)
    sections: tuple[int, ...] = ()

    def __call__(self, x: Inner, positions: Inner, head_dim: int) -> Inner:
        """x [B, S, heads*head_dim] rotated by positions i32 [B, S], or [3, B, S] for mrope."""
        if positions.ndim == 3:
            return rotated(x, *self._by_section(positions), head_dim, self.rope.interleaved)
        done = self.rope(x, positions, head_dim)
        if self.mscales == (1.0, 1.0):
            return done
        short, long = (F.full(float(each)) for each in self.mscales)
        length = F.reduce_max(positions, dims=(0, 1)) + 1
        factor = F.where(F.gt(length, self.rope.original_positions), long, short)
        return (done.cast("f32") * factor).cast(x.dtype)

    def _by_section(self, positions: Inner) -> tuple[Inner, Inner]:
        """cos and sin f32 [B, S, pairs], each pair by the dimension of its section."""
        inverse = _inverse(self.rope.theta, self.rope.rotary_dim)
        pairs = self.rope.rotary_dim // 2
        if len(self.sections) != positions.shape[0] or sum(self.sections) != pairs:
            raise Error(
                f"mrope: expected an mrope_section of {positions.shape[0]} numbers that add up to "
                f"{pairs}, found {list(self.sections)}",
                loc=here(),
            )
        angles = positions.cast("f32").unsqueeze(3) * inverse
        parts: list[Inner] = []
        first = 0
        for dim, count in enumerate(self.sections):
            parts.append(angles[dim][..., first : first + count])
            first += count
        joined = F.concat(parts, 2)
        return F.cos(joined), F.sin(joined)


def rotary(
    kind: PositionEmbeddingType,
    head_dim: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    scale_type: RotaryScalingType | None = None,
    percentage: float = 1.0,
    max_positions: int = 1024,
    original_positions: int | None = None,
    short_factors: Sequence[float] | None = None,
    long_factors: Sequence[float] | None = None,
    mscales: tuple[float | None, float | None] = (None, None),
) -> Rotary:
    """The rotation of a layer with these settings, whose names are those of `Attention`."""
    table = dict(scaling or {})
    stretch = scaling_type(table) if scale_type is None else scale_type
    if kind is PositionEmbeddingType.long_rope:
        stretch = RotaryScalingType.longrope
    if kind is PositionEmbeddingType.yarn and stretch is not RotaryScalingType.yarn:
        raise Error("yarn positions need a rotary_scaling of the type yarn", loc=here())
    if stretch.name in ("linear", "dynamic", "yarn") and "factor" not in table:
        raise Error(
            f"rotary_scaling: expected the key 'factor' of {stretch.name}, found {table}",
            loc=here(),
        )
    factor = float(table.get("factor", 1.0))
    original = table.get("original_max_position_embeddings", original_positions)
    fraction = 0.5 if kind is PositionEmbeddingType.chatglm else percentage
    options: dict[str, Any] = {"theta": float(base), "rotary_dim": int(head_dim * fraction)}
    options["interleaved"] = kind is PositionEmbeddingType.rope_gptj
    found: tuple[float, float] = (1.0, 1.0)
    match stretch:
        case RotaryScalingType.linear:
            options |= {"kind": "linear", "factor": factor}
        case RotaryScalingType.dynamic:
            trained = table.get("original_max_position_embeddings", max_positions)
            options |= {"kind": "dynamic", "factor": factor, "original_positions": trained}
        case RotaryScalingType.llama3:
            options |= {"kind": "llama3", "factor": float(table.get("factor", 8.0))}
            options |= {k: float(table[k]) for k in table if k.endswith("_freq_factor")}
            options["original_positions"] = table.get("original_max_position_embeddings", 8192)
        case RotaryScalingType.yarn:
            keys = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
            options |= {k: float(table[k]) for k in keys if table.get(k) is not None}
            options |= {"kind": "yarn", "factor": factor}
            options["original_positions"] = table.get("original_max_position_embeddings", 4096)
        case RotaryScalingType.longrope:
            short = table.get("short_factor", short_factors)
            long = table.get("long_factor", long_factors)
            if short is None or long is None or original is None:
                raise Error(
                    "long_rope needs rope_scaling_short_factors, rope_scaling_long_factors and "
                    "original_max_position_embeddings",
                    loc=here(),
                )
            options |= {"kind": "longrope", "original_positions": original}
            options["factor"] = max_positions / original
            short_scale, long_scale = mscales
            if (short_scale is None) != (long_scale is None):
                raise Error(
                    "expected both rope_scaling_short_mscale and rope_scaling_long_mscale, or "
                    "neither; found one of them",
                    loc=here(),
                )
            if short_scale is not None and long_scale is not None:
                options["attention_factor"], found = 1.0, (float(short_scale), float(long_scale))
            options["short_factors"] = tuple(float(each) for each in short)
            options["long_factors"] = tuple(float(each) for each in long)
        case _:
            pass
    return Rotary(Rope(**options), found, tuple(table.get("mrope_section", ())))


def _inverse(theta: float, rotary_dim: int) -> Inner:
    """The radians per position of every pair: f32 [rotary_dim / 2]."""
    powers = F.cast(F.iota(rotary_dim // 2), "f32") * (-2.0 / rotary_dim)
    return F.pow(F.full(float(theta)), powers)


def table_angles(table: Inner, positions: Inner, rotary_dim: int) -> tuple[Inner, Inner]:
    """cos and sin f32 [B, S, pairs] from a table of [cos, sin] per pair and position."""
    rows = table.reshape(-1, rotary_dim // 2, 2)
    found = F.gather(rows, positions, dim=0).cast("f32")
    return found[..., 0], found[..., 1]


def mrope_angles(
    table: Inner,
    deltas: Inner | None,
    positions: Inner,
    prompt: Inner | None,
    theta: float,
    rotary_dim: int,
) -> tuple[Inner, Inner]:
    """cos and sin f32 [B, S, pairs] of mrope.

    Tokens of the prompt, of `prompt` i32 [B] tokens, take theirs from `table` [B, N * rotary_dim],
    [cos, sin] per pair and position; later ones have the angle of position + `deltas` i32 [B, 1].
    """
    if deltas is None or prompt is None:
        raise Error(
            "mrope_rotary_cos_sin needs mrope_position_deltas and context_lengths", loc=here()
        )
    batch, tokens = positions.shape
    rows = table.reshape(table.shape[0], -1, rotary_dim)
    size = rows.shape[1]
    last = size - 1 if isinstance(size, int) else None
    places = F.clip(positions, low=0, high=last) if last is not None else positions
    index = F.expand(places.unsqueeze(2), (batch, tokens, rotary_dim))
    given = F.gather_elements(rows, index, dim=1).reshape(batch, tokens, rotary_dim // 2, 2)
    later = (positions + deltas).cast("f32").unsqueeze(2) * _inverse(theta, rotary_dim)
    inside = F.lt(positions, prompt.unsqueeze(1)).unsqueeze(2)
    cos = F.where(inside, given[..., 0].cast("f32"), F.cos(later))
    return cos, F.where(inside, given[..., 1].cast("f32"), F.sin(later))


# -- what scripts call


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
        settings = {"factor": scale, **(rope_scaling_config or {})}
        made = rotary(
            PositionEmbeddingType.rope_gpt_neox,
            dim,
            base=theta,
            scaling=settings,
            scale_type=scale_type,
            max_positions=num_pos,
        ).rope
        attributes: Any = SimpleNamespace(**asdict(made), turned=dim)
        inverse, factor = inverse_frequencies(attributes)
        angles = np.arange(num_pos)[:, None] * inverse.astype(np.float64)
        pairs = np.stack([np.cos(angles), np.sin(angles)], axis=-1) * factor
        return inverse.astype(dtype), pairs.reshape(1, -1).astype(dtype)

    @staticmethod
    def rotate_every_two(tensor: Tensor) -> Tensor:
        """[..., D]: (a, b) of every two features becomes (-b, a)."""
        x = unwrap(tensor)
        a, b = x.reshape(*x.shape[:-1], -1, 2).split(1, -1)
        return wrap(F.concat([-b, a], -1).reshape(*x.shape))

    @staticmethod
    def rotate_half(tensor: Tensor) -> Tensor:
        """[..., D]: the halves (a, b) of the features become (-b, a)."""
        x = unwrap(tensor)
        a, b = x.split(x.shape[-1] // 2, -1)
        return wrap(F.concat([-b, a], -1))

    @staticmethod
    def apply_rotary_pos_emb(
        tensor: Tensor,
        position_embedding: Sequence[Tensor],
        pos_emb_type: PositionEmbeddingType = PositionEmbeddingType.rope_gptj,
    ) -> Tensor:
        """tensor [B, S, heads, D] rotated; `position_embedding` is [cos, sin], each [B, S, D / 2].

        Of chatglm they are cos and sin of the first half of the features, then of the second, in
        the order cos, cos, sin, sin, each [B, S, 1, D / 2].
        """
        utils, x = RopeEmbeddingUtils, unwrap(tensor)
        if pos_emb_type is PositionEmbeddingType.chatglm:
            halves = x.split(x.shape[-1] // 2, 3)
            cos, sin = position_embedding[:2], position_embedding[2:]
            done = [
                part * unwrap(c) + unwrap(utils.rotate_half(wrap(part))) * unwrap(s)
                for part, c, s in zip(halves, cos, sin, strict=True)
            ]
            return wrap(F.concat(done, 3))
        if pos_emb_type not in (
            PositionEmbeddingType.rope_gptj,
            PositionEmbeddingType.rope_gpt_neox,
        ):
            raise Error(f"expected positions that rotate, found {pos_emb_type}", loc=here())
        cos, sin = (unwrap(each) for each in position_embedding)
        flat = x.reshape(*x.shape[:2], -1)
        pairwise = pos_emb_type is PositionEmbeddingType.rope_gptj
        width = x.shape[-1]
        assert isinstance(width, int)
        return wrap(rotated(flat, cos, sin, width, pairwise).reshape(*x.shape))


def chatglm_rotated(x: Inner, positions: Inner | None, head_dim: int, rope: Rope) -> Inner:
    """x [B, S, heads*head_dim] as ChatGLM rotates it, by a rope of half a head.

    With positions [B, 2, S] (ChatGLM-6B) the halves of a head turn by the two rows, in pairs
    (i, i + head_dim / 4). With positions [B, S] (ChatGLM2) the first half turns, in pairs
    (2i, 2i + 1), and the second stays.
    """
    if positions is None:
        raise Error("attention with chatglm positions needs position_embedding", loc=here())
    half = head_dim // 2
    if positions.ndim == 2:
        return replace(rope, interleaved=True)(x, positions, head_dim)
    heads = x.reshape(*x.shape[:2], -1, head_dim)
    rows = (positions[:, 0], positions[:, 1])
    done = [
        rope(part.reshape(*x.shape[:2], -1), row, half).reshape(*part.shape)
        for part, row in zip(heads.split(half, 3), rows, strict=True)
    ]
    return F.concat(done, 3).reshape(*x.shape)
