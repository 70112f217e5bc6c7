"""TensorRT-LLM's Python runtime over irc artifacts: sessions, runners and their settings."""

from ..api import register
from .configs import ModelConfig as ModelConfig
from .configs import SamplingConfig as SamplingConfig
from .configs import decode_words_list as decode_words_list
from .configs import to_word_list_format as to_word_list_format
from .generation import GenerationSession as GenerationSession
from .generation import ModelRunner as ModelRunner
from .session import Session as Session
from .session import TensorInfo as TensorInfo

register("runtime.PYTHON_BINDINGS", False)  # the runtime in C++ is not installed
