"""TensorRT-LLM's Python runtime over irc artifacts: sessions, runners and their settings."""

from ..api import register
from .generation import GenerationSession as GenerationSession
from .generation import ModelConfig as ModelConfig
from .generation import ModelRunner as ModelRunner
from .generation import SamplingConfig as SamplingConfig
from .generation import decode_words_list as decode_words_list
from .generation import to_word_list_format as to_word_list_format
from .session import Session as Session
from .session import TensorInfo as TensorInfo

register("runtime.PYTHON_BINDINGS", False)  # the runtime in C++ is not installed
