"""Models by their config.json: what families share, and `families/`, a file each."""

from . import families as families
from .decoder import CausalLM as CausalLM
from .decoder import DecoderConfig as DecoderConfig
from .family import FAMILIES as FAMILIES
from .family import Family as Family
from .family import Signature as Signature
from .family import described as described
from .family import find_family as find_family
from .family import register as register
from .stored import Stored as Stored
