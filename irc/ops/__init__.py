"""Every operation of the language. Importing this registers them all."""

# ruff: noqa: F403
from __future__ import annotations

from ..ir.declare import REGISTRY
from .activation import *
from .attention import *
from .collective import *
from .control import *
from .convolution import *
from .cyclic import *
from .distributed import *
from .elementwise import *
from .experts import *
from .functions import *
from .fused_attention import *
from .fused_collective import *
from .fused_linear import *
from .layout import *
from .logic import *
from .lookup import *
from .matmul import *
from .mlp import *
from .moe import *
from .norm import *
from .parts import *
from .quant import *
from .quantize_rows import *
from .recurrent import *
from .reduce import *
from .rope import *
from .sample import *
from .shape import *
from .slots import *

__all__ = sorted(cls.__name__ for cls in REGISTRY.values())  # pyright: ignore[reportUnsupportedDunderAll]
