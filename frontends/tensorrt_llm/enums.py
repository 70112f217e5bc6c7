"""The enumerations of attention and of layers, with the numbers of TensorRT-LLM 0.16."""

from __future__ import annotations

from enum import IntEnum

from ...errors import Error, did_you_mean
from ...source import here


class _Named(IntEnum):
    """An enumeration whose members are also found by name."""

    @classmethod
    def from_string(cls, s: str) -> _Named:
        """The member of this name."""
        if s not in cls.__members__:
            near, names = did_you_mean(s, cls.__members__), ", ".join(cls.__members__)
            raise Error(f"no {cls.__name__} {s!r}{near}; expected one of {names}", loc=here())
        return cls.__members__[s]

    @classmethod
    def choices(cls) -> list[str]:
        """The names of all members."""
        return list(cls.__members__)

    def __str__(self) -> str:
        return self.name


class AttentionMaskType(_Named):
    """Which keys a query may see."""

    padding, causal, sliding_window_causal, bidirectional = range(4)
    bidirectionalglm, blocksparse, custom_mask = range(4, 7)


class PositionEmbeddingType(_Named):
    """How attention takes the positions of tokens into account."""

    learned_absolute, rope_gptj, rope_gpt_neox, long_rope, alibi = range(5)
    alibi_with_scale, relative, chatglm, yarn, mrope = range(5, 10)

    def is_rope(self) -> bool:
        """Whether queries and keys are rotated; `chatglm` is rotated by positions of its own."""
        return self.name in ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn", "mrope")

    def is_alibi(self) -> bool:
        """Whether distances are added to the scores with fixed slopes."""
        return self.name in ("alibi", "alibi_with_scale")


class RotaryScalingType(_Named):
    """How the frequencies of a rotary embedding are stretched beyond the trained length."""

    none, linear, dynamic, longrope, llama3, yarn, mrope = range(7)


class MLPType(_Named):
    """The classes of feed-forward layers."""

    MLP, GatedMLP, FusedGatedMLP = range(3)


class LayerNormType(_Named):
    """The classes of normalization layers."""

    LayerNorm, RmsNorm, GroupNorm = range(3)


class LayerNormPositionType(_Named):
    """Whether the norm is before or after the layer that it belongs to."""

    pre_layernorm, post_layernorm = range(2)
