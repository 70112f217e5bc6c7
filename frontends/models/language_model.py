"""The arguments and results of every causal language model in irc.

Arguments: `input_ids` i32 [B, S], the tokens of this call; `positions` i32 [B, S], their positions;
`past_lengths` i32 [B], the number of tokens in the caches; `logit_positions` i32 [B, T], the tokens
of this call whose logits are requested; and the states of every layer, such as `k0`, `v0`, `k1`,
... [B, kv_heads, C, head_dim], its caches of capacity C. A model with states without C, whose size
is fixed, also takes `lengths` i32 [B], the tokens of this call in each row; those behind are
padding, which leave such states as they are. Results: `logits` f32 [B, T, vocab], and every state
under its own name, aliased to the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .. import functional as F
from ..layers.attention import Cache
from ..tensor import Tensor
from ..trace import Spec
from .family import Signature

LONGEST_CALL = (
    256  # tokens of a call where layers have fixed states, whose work grows by its square
)
States = Mapping[str, Spec]  # the states of one layer, by names without the number of the layer


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
    """The signature of a model whose layers all have a cache of `dtype` of the same sizes."""
    layer = key_value_cache(sizes.kv_heads, sizes.head_size, dtype)
    return signature_of([layer] * sizes.num_hidden_layers, sizes.max_position_embeddings)


def key_value_cache(heads: int, key_size: int, dtype: str, value_size: int = 0) -> States:
    """The states of a layer with keys and values [B, heads, C, size]; `value_size` 0 is equal."""
    keys = Spec(dtype, ("B", heads, "C", key_size))
    return {"k": keys, "v": Spec(dtype, ("B", heads, "C", value_size or key_size))}


def signature_of(layers: Sequence[States], longest: int, positions: bool = True) -> Signature:
    """The signature of a model with these states: up to 8 rows, decoding one token a call.

    A model that does not depend on `positions`, as with ALiBi, has no such argument.
    """
    states = {f"{name}{i}": spec for i, layer in enumerate(layers) for name, spec in layer.items()}
    inputs = {
        "input_ids": Spec("i32", ("B", "S")),
        **({"positions": Spec("i32", ("B", "S"))} if positions else {}),
        "past_lengths": Spec("i32", ("B",)),
        "logit_positions": Spec("i32", ("B", "T")),
        **states,
    }
    call = longest
    if any("C" not in spec.shape for spec in states.values()):
        inputs["lengths"] = Spec("i32", ("B",))
        call = min(longest, LONGEST_CALL)
    dims = {"B": (1, 1, 8), "S": (1, min(128, call), call), "T": (1, 1, call)}
    if any("C" in spec.shape for spec in states.values()):
        dims["C"] = (1, longest, longest)
    return Signature(inputs, dims, {name: name for name in states})


def layer_caches(caches: Mapping[str, Tensor], layers: int) -> list[Cache]:
    """The cache of every layer from the arguments k0, v0, ..."""
    return [Cache(caches[f"k{i}"], caches[f"v{i}"]) for i in range(layers)]


def results(logits: Tensor, caches: Sequence[Cache]) -> dict[str, Tensor]:
    """The results of @forward by name, where every layer has a cache."""
    return results_of(logits, [{"k": cache.keys, "v": cache.values} for cache in caches])


def results_of(logits: Tensor, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The results of @forward by name: the logits, and the states of every layer."""
    named = {"logits": logits}
    for i, layer in enumerate(states):
        named |= {f"{name}{i}": state.named(f"{name}{i}") for name, state in layer.items()}
    return named


def at_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """The rows of hidden [B, S, H] at positions i32 [B, T], as [B, T, H]."""
    batch, rows = positions.shape
    index = positions.unsqueeze(2).expand(batch, rows, hidden.shape[2])
    return F.gather_elements(hidden, index, dim=1)
