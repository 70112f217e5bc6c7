"""Layers by the names of TensorRT-LLM."""

# ruff: noqa: F401

from .attention import Attention, BertAttention
from .attention_params import (
    AttentionMaskParams,
    AttentionParams,
    BlockSparseAttnParams,
    KeyValueCacheParams,
    LoraConfig,
    LoraParams,
    MropeParams,
    SpecDecodingParams,
)
from .conv import AvgPool2d, Cast, Conv1d, Conv2d, ConvTranspose2d, Mish
from .embedding import Embedding, PromptTuningEmbedding
from .linear import ColumnLinear, Linear, RowLinear
from .mlp import MLP, FusedGatedMLP, GatedMLP
from .moe import MOE, MixtureOfExperts, MoeConfig
from .norms import GroupNorm, LayerNorm, RmsNorm
