"""Layers by the names of TensorRT-LLM."""

from .embedding import Embedding as Embedding
from .embedding import PromptTuningEmbedding as PromptTuningEmbedding
from .linear import ColumnLinear as ColumnLinear
from .linear import Linear as Linear
from .linear import RowLinear as RowLinear
