"""Models of TensorRT-LLM. LLaMA has the constructors of the session's dialect."""

from __future__ import annotations

from typing import Any

from ..context import dialect
from . import llama, llama_keywords
from .config import LLaMAConfig as LLaMAConfig
from .config import PretrainedConfig as PretrainedConfig
from .decoder import DecoderLayerList as DecoderLayerList
from .decoder import DecoderModelForCausalLM as DecoderModelForCausalLM
from .decoder import PretrainedModel as PretrainedModel
from .generation_mixin import GenerationMixin as GenerationMixin

_OF_DIALECT = ("LLaMADecoderLayer", "LLaMAModel", "LLaMAForCausalLM")


def __getattr__(name: str) -> Any:
    if name not in _OF_DIALECT:
        raise AttributeError(name)
    return getattr(llama_keywords if dialect() == "A" else llama, name)
