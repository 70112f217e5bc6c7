"""Mixtral: a Llama whose feed-forwards are mixtures of experts. Jiang et al., 2024.

Names of parameters as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import Error
from ...weights import Ref, Slice, UnboundRef
from ..layers import MixtureOfExperts, RmsNorm
from ..layers.attention import Cache
from ..module import Module
from ..tensor import Tensor
from .llama import Llama, LlamaConfig, attention_of


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """The sizes of a Mixtral; `intermediate_size` is that of one expert."""

    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            raise Error(
                f"num_experts_per_tok {self.num_experts_per_tok} lies outside 1 to "
                f"num_local_experts {self.num_local_experts}"
            )


class MixtralLayer(Module):
    """Attention and a mixture of experts, each behind a norm and added to its input."""

    def __init__(self, config: MixtralConfig, dtype: str) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(size, eps, dtype=dtype)
        self.self_attn = attention_of(config, dtype)
        self.post_attention_layernorm = RmsNorm(size, eps, dtype=dtype)
        self.block_sparse_moe = MixtureOfExperts(
            size,
            config.intermediate_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            act=config.hidden_act,
            names=("w1", "w3", "w2"),
            dtype=dtype,
        )

    def forward(
        self, x: Tensor, positions: Tensor, past: Tensor, cache: Cache
    ) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size] to the same, and the cache after this call."""
        mixed, cache = self.self_attn(self.input_layernorm(x), positions, cache=cache, past=past)
        x = x + mixed
        return x + self.block_sparse_moe(self.post_attention_layernorm(x)), cache


class Mixtral(Llama):
    """A Mixtral with its language model head, called as models/language_model.py says."""

    def __init__(self, config: MixtralConfig, dtype: str = "f32") -> None:
        super().__init__(config, dtype, MixtralLayer)


def fused_names(config: MixtralConfig) -> Iterator[tuple[str, Ref]]:
    """Weights and where transformers 5 has them if it saves models as it holds them in memory.

    There the experts of a layer are one tensor, gate and up projection in one.
    """
    experts, size, width = (
        config.num_local_experts,
        config.hidden_size,
        config.intermediate_size,
    )
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}.block_sparse_moe.", f"model.layers.{i}.mlp."
        both = UnboundRef(f"{theirs}experts.gate_up_proj", (experts, 2 * width, size))
        yield f"{ours}gate.weight", UnboundRef(f"{theirs}gate.weight")
        yield f"{ours}experts.gate", both.then(Slice((None, (0, width), None)))
        yield f"{ours}experts.up", both.then(Slice((None, (width, 2 * width), None)))
        yield f"{ours}experts.down", UnboundRef(f"{theirs}experts.down_proj")
