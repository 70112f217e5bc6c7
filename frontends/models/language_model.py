"""The arguments and results of every causal language model in irc.

Arguments: `input_ids` i32 [B, S], the tokens of this call; `positions` i32 [B, S], their positions;
`past_lengths` i32 [B], the number of tokens in the caches; `logit_positions` i32 [B, T], the tokens
of this call whose logits are requested; `k0`, `v0`, `k1`, ... [B, kv_heads, C, head_dim], the
caches of capacity C. Results: `logits` f32 [B, T, vocab], and every cache under its own name,
aliased to the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .. import functional as F
from ..layers.attention import Cache
from ..tensor import Tensor
from ..trace import Spec
from .family import Signature


class Sizes(Protocol):
    """The sizes that determine the caches and the longest sequence of a model."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


def signature(sizes: Sizes, dtype: str) -> Signature:
    """The signature of a model with caches of `dtype`: up to 8 rows, decoding one token a call."""
    names, longest = cache_names(sizes.num_hidden_layers), sizes.max_position_embeddings
    cache = Spec(dtype, ("B", sizes.kv_heads, "C", sizes.head_size))
    inputs = {
        "input_ids": Spec("i32", ("B", "S")),
        "positions": Spec("i32", ("B", "S")),
        "past_lengths": Spec("i32", ("B",)),
        "logit_positions": Spec("i32", ("B", "T")),
        **dict.fromkeys(names, cache),
    }
    dims = {
        "B": (1, 1, 8),
        "S": (1, min(128, longest), longest),
        "T": (1, 1, longest),
        "C": (1, longest, longest),
    }
    return Signature(inputs, dims, {name: name for name in names})


def cache_names(layers: int) -> list[str]:
    """k0, v0, k1, v1, ..."""
    return [f"{kind}{i}" for i in range(layers) for kind in "kv"]


def layer_caches(caches: Mapping[str, Tensor], layers: int) -> list[Cache]:
    """The cache of every layer from the arguments k0, v0, ..."""
    return [Cache(caches[f"k{i}"], caches[f"v{i}"]) for i in range(layers)]


def results(logits: Tensor, caches: list[Cache]) -> dict[str, Tensor]:
    """The results of @forward by name."""
    named = {"logits": logits}
    for i, (keys, values) in enumerate(caches):
        named |= {f"k{i}": keys.named(f"k{i}"), f"v{i}": values.named(f"v{i}")}
    return named


def at_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """The rows of hidden [B, S, H] at positions i32 [B, T], as [B, T, H]."""
    batch, rows = positions.shape
    index = positions.unsqueeze(2).expand(batch, rows, hidden.shape[2])
    return F.gather_elements(hidden, index, dim=1)
