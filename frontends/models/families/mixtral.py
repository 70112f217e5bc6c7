"""Mixtral: a decoder whose feed-forwards are mixtures of experts. Jiang et al., 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....errors import Error
from ....weights import Ref, Slice, UnboundRef
from ...layers import MixtureOfExperts
from ...tensor import Tensor
from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, DecoderLayer, read_decoder, register_decoder, tied_embeddings

_MOST_EXPERTS = 1 << 16  # of all layers


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
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
        if self.num_hidden_layers * self.num_local_experts > _MOST_EXPERTS:
            raise Error(
                f"config.json has {self.num_local_experts} experts in {self.num_hidden_layers} "
                f"layers; expected at most {_MOST_EXPERTS} in all"
            )


class MixtralLayer(DecoderLayer):
    """Attention and a mixture of experts, each preceded by a norm and added to its input."""

    def add_feed_forward(self, config: MixtralConfig, dtype: str) -> None:
        """Create the experts and their router."""
        self.block_sparse_moe = MixtureOfExperts(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            act=config.hidden_act,
            names=("w1", "w3", "w2"),
            dtype=dtype,
        )

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] to the same."""
        return self.block_sparse_moe(x)


def _read(config: ConfigReader) -> MixtralConfig:
    for training_only in ("router_jitter_noise", "router_aux_loss_coef"):
        config.number(training_only, 0.0)
    defaults = {"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "norm_eps": 1e-5}
    return read_decoder(
        config,
        MixtralConfig,
        defaults=defaults,
        rope_theta=1e6,
        sliding_window=config.integer("sliding_window", 0),
        num_local_experts=config.integer("num_local_experts", 8),
        num_experts_per_tok=config.integer("num_experts_per_tok", 2),
    )


def _alternatives(config: MixtralConfig) -> Mapping[str, Ref]:
    """The names that transformers 5 writes: one tensor for all experts, gate and up joined."""
    found = dict(tied_embeddings(config))
    width = config.intermediate_size
    joined_shape = (config.num_local_experts, 2 * width, config.hidden_size)
    for i in range(config.num_hidden_layers):
        own, stored = f"model.layers.{i}.block_sparse_moe.", f"model.layers.{i}.mlp."
        joined = UnboundRef(f"{stored}experts.gate_up_proj", joined_shape)
        found |= {
            f"{own}gate.weight": UnboundRef(f"{stored}gate.weight"),
            f"{own}experts.gate": joined.then(Slice((None, (0, width), None))),
            f"{own}experts.up": joined.then(Slice((None, (width, 2 * width), None))),
            f"{own}experts.down": UnboundRef(f"{stored}experts.down_proj"),
        }
    return found


MIXTRAL = register_decoder("mixtral", ("MixtralForCausalLM",), _read, MixtralLayer, _alternatives)
