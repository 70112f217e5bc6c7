"""Layers by the names of TensorRT-LLM."""

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

__all__ = [
    "MLP", "MOE", "Attention", "AttentionMaskParams", "AttentionParams", "AvgPool2d",
    "BertAttention", "BlockSparseAttnParams", "Cast", "ColumnLinear", "Conv1d", "Conv2d",
    "ConvTranspose2d", "Embedding", "FusedGatedMLP", "GatedMLP", "GroupNorm", "KeyValueCacheParams",
    "LayerNorm", "Linear", "LoraConfig", "LoraParams", "Mish", "MixtureOfExperts", "MoeConfig",
    "MropeParams", "PromptTuningEmbedding", "RmsNorm", "RowLinear", "SpecDecodingParams",
]  # fmt: skip
