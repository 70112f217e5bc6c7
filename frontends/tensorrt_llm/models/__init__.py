"""Models of TensorRT-LLM."""

from . import llama as llama
from .config import LLaMAConfig as LLaMAConfig
from .config import PretrainedConfig as PretrainedConfig
from .decoder import DecoderLayerList as DecoderLayerList
from .decoder import DecoderModelForCausalLM as DecoderModelForCausalLM
from .decoder import GenerationMixin as GenerationMixin
from .decoder import PretrainedModel as PretrainedModel
