"""Model families, a file each: how config.json is read, the module, and names in checkpoints."""

from . import llama as llama
from . import mistral as mistral
from . import mixtral as mixtral
from . import qwen2 as qwen2
from . import qwen3 as qwen3
from .decoder import CausalLM as CausalLM
from .decoder import DecoderConfig as DecoderConfig
from .family import FAMILIES as FAMILIES
from .family import Family as Family
from .family import Signature as Signature
from .family import find_family as find_family
from .family import register as register
