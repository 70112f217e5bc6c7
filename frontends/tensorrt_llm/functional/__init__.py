"""Functions over the tensors of a network, by the names of TensorRT-LLM."""

# ruff: noqa: F403
from __future__ import annotations

from .. import enums
from ..api import bind_methods, declare, rows
from ..enums import *
from ..tensor import Tensor
from . import basic, collectives, convolution
from .attention import RopeEmbeddingUtils as RopeEmbeddingUtils
from .attention import bert_attention as bert_attention
from .attention import generate_alibi_biases as generate_alibi_biases
from .attention import generate_alibi_slopes as generate_alibi_slopes
from .attention import gpt_attention as gpt_attention
from .basic import *
from .collectives import *
from .convolution import *

for _module in (basic, collectives, convolution, enums):
    declare("functional", _module, "ACT2FN GATED_ACT_2_ACT")
for _path in rows():  # the functions that are methods of Tensor
    _owner, _, _name = _path.rpartition(".")
    if _owner == "functional.Tensor" and _name in globals():
        setattr(Tensor, _name, globals()[_name])
bind_methods("functional.Tensor", Tensor)
