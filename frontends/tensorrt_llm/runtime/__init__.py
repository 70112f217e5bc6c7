"""TensorRT-LLM's Python runtime over irc artifacts: sessions, runners and their settings."""

from ..api import register
from .configs import ModelConfig, SamplingConfig, decode_words_list, to_word_list_format
from .generation import (
    GenerationSession,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from .model_runner import ModelRunner, ModelRunnerCpp
from .session import Session, TensorInfo

PYTHON_BINDINGS = False  # whether the runtime in C++ is installed
register("runtime.PYTHON_BINDINGS", PYTHON_BINDINGS)

__all__ = [
    "PYTHON_BINDINGS",
    "GenerationSession",
    "LogitsProcessor",
    "LogitsProcessorList",
    "ModelConfig",
    "ModelRunner",
    "ModelRunnerCpp",
    "SamplingConfig",
    "Session",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "TensorInfo",
    "decode_words_list",
    "to_word_list_format",
]
