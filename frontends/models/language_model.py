"""The arguments and results by which every language model of irc is called, and their trace.

`input_ids` i32 [B, S]: the tokens of this call. `positions` i32 [B, S]: where they stand.
`past_lengths` i32 [B]: how many tokens the caches hold already. `logit_positions` i32 [B, T]: of
which tokens of this call logits are wanted. `k0`, `v0`, `k1`, ... [B, kv_heads, C, head_dim]: the
caches, of capacity C. Results: `logits` f32 [B, T, vocab], and every cache under its own name,
which reuses the memory of the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ... import core
from .. import functional as F
from ..layers.attention import Cache
from ..module import Module
from ..tensor import Tensor
from ..trace import Spec, trace

Dims = dict[str, tuple[int, int, int]]


class Sizes(Protocol):
    """What the caches of a model look like."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


def input_specs(sizes: Sizes, dtype: str) -> dict[str, Spec]:
    """The arguments of @forward."""
    specs = {
        "input_ids": Spec("i32", ("B", "S")),
        "positions": Spec("i32", ("B", "S")),
        "past_lengths": Spec("i32", ("B",)),
        "logit_positions": Spec("i32", ("B", "T")),
    }
    cache = Spec(dtype, ("B", sizes.kv_heads, "C", sizes.head_size))
    return specs | dict.fromkeys(cache_names(sizes.num_hidden_layers), cache)


def cache_names(layers: int) -> list[str]:
    """k0, v0, k1, v1, ..."""
    return [f"{kind}{i}" for i in range(layers) for kind in "kv"]


def default_dims(longest: int) -> Dims:
    """Ranges for a model of `longest` positions: up to 8 rows, decoding one token at a time."""
    return {
        "B": (1, 1, 8),
        "S": (1, min(128, longest), longest),
        "T": (1, 1, longest),
        "C": (1, longest, longest),
    }


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
    """The rows of hidden [B, S, H] at positions i32 [B, T]: [B, T, H]."""
    batch, rows = positions.shape
    index = positions.unsqueeze(2).expand(batch, rows, hidden.shape[2])
    return F.gather_elements(hidden, index, dim=1)


def trace_language_model(
    model: Module, sizes: Sizes, dtype: str, dims: Dims | None = None, name: str | None = None
) -> core.Module:
    """Trace a model whose forward takes the arguments above, the caches as **caches."""
    names = cache_names(sizes.num_hidden_layers)
    ranges = default_dims(sizes.max_position_embeddings) | (dims or {})
    inputs = input_specs(sizes, dtype)
    return trace(model, inputs, ranges, name, {cache: cache for cache in names})
