"""Model families that Hugging Face checkpoints are loaded into, and how they are called."""

from .language_model import trace_language_model as trace_language_model
from .llama import Llama as Llama
from .llama import LlamaConfig as LlamaConfig
from .mixtral import Mixtral as Mixtral
from .mixtral import MixtralConfig as MixtralConfig
