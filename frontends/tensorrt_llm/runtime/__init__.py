"""TensorRT-LLM's Python runtime over irc artifacts: sessions, runners and their settings."""

from .configs import ModelConfig, SamplingConfig, to_word_list_format
from .generation import GenerationSession
from .model_runner import ModelRunner, ModelRunnerCpp
from .session import Session, TensorInfo

PYTHON_BINDINGS = False  # whether the runtime in C++ is installed

__all__ = [
    "PYTHON_BINDINGS",
    "GenerationSession",
    "ModelConfig",
    "ModelRunner",
    "ModelRunnerCpp",
    "SamplingConfig",
    "Session",
    "TensorInfo",
    "to_word_list_format",
]
