"""The enumerations of attention and of layers, with the numbers of TensorRT-LLM 0.16."""

from __future__ import annotations

from enum import IntEnum

from ...errors import Error, did_you_mean
from ...source import here


class _Named(IntEnum):
    """An enumeration whose members are also found by name."""

    @classmethod
    def from_string(cls, name: str) -> _Named:
        """The member of this name."""
        found = cls.__members__.get(name)
        if found is None:
            guess = did_you_mean(name, cls.__members__)
            known = ", ".join(cls.__members__)
            raise Error(f"no {cls.__name__} {name!r}{guess}; expected one of {known}", loc=here())
        return found

    @classmethod
    def choices(cls) -> list[str]:
        """The names of all members."""
        return list(cls.__members__)

    def __str__(self) -> str:
        return self.name


class AttentionMaskType(_Named):
    """Which keys a query may see; `functional/masks.py` defines each."""

    padding = 0
    causal = 1
    sliding_window_causal = 2
    bidirectional = 3
    bidirectionalglm = 4
    blocksparse = 5
    custom_mask = 6


class PositionEmbeddingType(_Named):
    """How attention takes the positions of tokens into account."""

    learned_absolute = 0
    rope_gptj = 1
    rope_gpt_neox = 2
    long_rope = 3
    alibi = 4
    alibi_with_scale = 5
    relative = 6
    chatglm = 7
    yarn = 8
    mrope = 9

    def is_rope(self) -> bool:
        """Whether queries and keys are rotated; `chatglm` is rotated by positions of its own."""
        return self.name in ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn", "mrope")

    def is_mrope(self) -> bool:
        """Whether the angles come from positions of several dimensions."""
        return self is PositionEmbeddingType.mrope

    def is_alibi(self) -> bool:
        """Whether distances are added to the scores with fixed slopes."""
        return self.name in ("alibi", "alibi_with_scale")

    def is_deferred(self) -> bool:
        """Whether learned biases are added to the scores."""
        return self is PositionEmbeddingType.relative


class RotaryScalingType(_Named):
    """How the frequencies of a rotary embedding are stretched beyond the trained length."""

    none = 0
    linear = 1
    dynamic = 2
    longrope = 3
    llama3 = 4
    yarn = 5
    mrope = 6


class MLPType(_Named):
    """The classes of feed-forward layers."""

    MLP = 0
    GatedMLP = 1
    FusedGatedMLP = 2


class LayerNormType(_Named):
    """The classes of normalization layers."""

    LayerNorm = 0
    RmsNorm = 1
    GroupNorm = 2


class LayerNormPositionType(_Named):
    """Whether the norm is before or after the layer that it belongs to."""

    pre_layernorm = 0
    post_layernorm = 1
