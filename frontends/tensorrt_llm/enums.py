"""Enumerations: those of attention and layers (TensorRT-LLM 0.16), and of TensorRT (10.7)."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from ...errors import did_you_mean
from .errors import ScriptError


class _Named(IntEnum):
    """An enumeration whose members are also found by name."""

    @classmethod
    def from_string(cls, s: str) -> Any:
        """The member of this name."""
        if s not in cls.__members__:
            near, names = did_you_mean(s, cls.__members__), ", ".join(cls.__members__)
            raise ScriptError(f"no {cls.__name__} {s!r}{near}; expected one of {names}")
        return cls.__members__[s]

    @classmethod
    def choices(cls) -> list[str]:
        """The names of all members."""
        return list(cls.__members__)

    def __str__(self) -> str:
        return self.name


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


class AttentionMaskType(_Named):
    """Which keys a query may see."""

    padding, causal, sliding_window_causal, bidirectional = range(4)
    bidirectionalglm, blocksparse, custom_mask = range(4, 7)


# classes of layers, and whether a norm is before or after its layer
MLPType = IntEnum("MLPType", "MLP GatedMLP FusedGatedMLP", start=0)
LayerNormType = IntEnum("LayerNormType", "LayerNorm RmsNorm GroupNorm", start=0)
LayerNormPositionType = IntEnum("LayerNormPositionType", "pre_layernorm post_layernorm", start=0)
SideStreamIDType = IntEnum("SideStreamIDType", "disable moe", start=0)  # backends choose streams

# Those that scripts name beside layers of TensorRT's network; members count from 0.
_OF_TENSORRT = """
BuilderFlag: FP16 INT8 DEBUG GPU_FALLBACK REFIT DISABLE_TIMING_CACHE TF32 SPARSE_WEIGHTS
  SAFETY_SCOPE OBEY_PRECISION_CONSTRAINTS PREFER_PRECISION_CONSTRAINTS DIRECT_IO VERSION_COMPATIBLE
  EXCLUDE_LEAN_RUNTIME FP8 ERROR_ON_TIMING_CACHE_MISS BF16 DISABLE_COMPILATION_CACHE STRIP_PLAN
  REFIT_IDENTICAL WEIGHT_STREAMING INT4 REFIT_INDIVIDUAL STRICT_NANS MONITOR_MEMORY FP4
  EDITABLE_TIMING_CACHE
ElementWiseOperation: SUM PROD MAX MIN SUB DIV POW FLOOR_DIV AND OR XOR EQUAL GREATER LESS
LayerType: CONVOLUTION CAST ACTIVATION POOLING LRN SCALE SOFTMAX DECONVOLUTION CONCATENATION
  ELEMENTWISE PLUGIN UNARY PADDING SHUFFLE REDUCE TOPK GATHER MATRIX_MULTIPLY RAGGED_SOFTMAX
  CONSTANT IDENTITY PLUGIN_V2 SLICE SHAPE PARAMETRIC_RELU RESIZE TRIP_LIMIT RECURRENCE ITERATOR
  LOOP_OUTPUT SELECT FILL QUANTIZE DEQUANTIZE CONDITION CONDITIONAL_INPUT CONDITIONAL_OUTPUT SCATTER
  EINSUM ASSERTION ONE_HOT NON_ZERO GRID_SAMPLE NMS REVERSE_SEQUENCE NORMALIZATION PLUGIN_V3
MemoryPoolType: WORKSPACE DLA_MANAGED_SRAM DLA_LOCAL_DRAM DLA_GLOBAL_DRAM TACTIC_DRAM
  TACTIC_SHARED_MEMORY
NetworkDefinitionCreationFlag: EXPLICIT_BATCH STRONGLY_TYPED
ReduceOperation: SUM PROD MAX MIN AVG NONE
TensorIOMode: NONE INPUT OUTPUT
TensorLocation: DEVICE HOST
"""
_ROWS = (row.split(": ") for row in _OF_TENSORRT.strip().replace("\n  ", " ").split("\n"))
OF_TENSORRT: dict[str, Any] = {
    name: IntEnum(name, members, start=0)  # pyright: ignore[reportArgumentType]
    for name, members in _ROWS
}
