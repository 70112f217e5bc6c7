"""Layers by the names of TensorRT-LLM."""

from .attention import Attention as Attention
from .attention_parameters import AttentionMaskParams as AttentionMaskParams
from .attention_parameters import AttentionParams as AttentionParams
from .attention_parameters import BlockSparseAttnParams as BlockSparseAttnParams
from .attention_parameters import KeyValueCacheParams as KeyValueCacheParams
from .attention_parameters import MropeParams as MropeParams
from .attention_parameters import SpecDecodingParams as SpecDecodingParams
from .bert_attention import BertAttention as BertAttention
from .embedding import Embedding as Embedding
from .embedding import PromptTuningEmbedding as PromptTuningEmbedding
from .linear import ColumnLinear as ColumnLinear
from .linear import Linear as Linear
from .linear import RowLinear as RowLinear
