"""Model families that Hugging Face checkpoints are loaded into."""

from .llama import Llama as Llama
from .llama import LlamaConfig as LlamaConfig
