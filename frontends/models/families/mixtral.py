"""Mixtral: a decoder whose feed-forwards are mixtures of experts. Jiang et al., 2024."""

from __future__ import annotations

from collections.abc import Mapping

from ....weights import Ref, UnboundRef
from ...tensor import Tensor
from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, DecoderLayer, read_decoder, register_decoder, tied_embeddings
from ..mixture import joined_alternatives, read_mixture

_PATH = "block_sparse_moe"


class MixtralLayer(DecoderLayer):
    """A layer whose mixture of experts has a name of its own in checkpoints."""

    def add_feed_forward(self, config: DecoderConfig, dtype: str) -> None:
        """Create the experts and their router."""
        assert config.mixture is not None
        self.block_sparse_moe = config.mixture.layer(config.hidden_size, dtype)

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] to the same."""
        return self.block_sparse_moe(x)


def _read(config: ConfigReader) -> DecoderConfig:
    defaults = {"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "norm_eps": 1e-5}
    names = ("w1", "w3", "w2")
    mixture = read_mixture(config, "intermediate_size", "num_local_experts", (8, 2), names=names)
    return read_decoder(
        config,
        defaults=defaults,
        rope_theta=1e6,
        sliding_window=config.integer("sliding_window", 0),
        mixture=mixture,
    )


def _alternatives(config: DecoderConfig) -> Mapping[str, Ref]:
    """The names that transformers 5 writes: one tensor for all experts, gate and up joined."""
    gates = {
        f"model.layers.{i}.{_PATH}.gate.weight": UnboundRef(f"model.layers.{i}.mlp.gate.weight")
        for i in range(config.num_hidden_layers)
    }
    return {**tied_embeddings(config), **gates, **dict(joined_alternatives(config, _PATH))}


MIXTRAL = register_decoder("mixtral", ("MixtralForCausalLM",), _read, MixtralLayer, _alternatives)
