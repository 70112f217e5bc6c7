"""Layers by the names of TensorRT-LLM."""

# ruff: noqa: F403
from .attention import *
from .attention_params import *
from .conv import *
from .embedding import *
from .linear import *
from .mlp import *
from .norms import *
