"""Granite 4 hybrid: most layers are Mamba-2, with or without experts. IBM, 2025."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....weights import Ref, Slice, UnboundRef
from ...layers import GatedMLP, MixtureOfExperts
from ...layers.recurrent import Mamba2, RecurrentSizes
from ...tensor import Tensor
from ..config_reader import ConfigReader
from ..decoder import read_decoder, read_layer_types, register_decoder, tied_embeddings
from ..hybrid import HybridConfig, HybridLayer, mamba2_stored, parts_of
from ..stored import Stored

_MAMBA, _ATTENTION = {"mixer": Mamba2}, {"mixer": None}
_TYPES = {
    "linear_attention": _MAMBA,
    "mamba": _MAMBA,
    "full_attention": _ATTENTION,
    "attention": _ATTENTION,
}


@dataclass(frozen=True)
class GraniteHybridConfig(HybridConfig):
    """The sizes of a Granite hybrid; `experts` 0: the shared feed-forward alone."""

    experts: int = 0
    experts_per_token: int = 0
    shared_size: int = 0


class GraniteHybridLayer(HybridLayer):
    """Mamba-2 or attention, and a feed-forward with experts or without."""

    def add_feed_forward(self, config: Any, dtype: str) -> None:
        """Create the feed-forward."""
        size, act = config.hidden_size, config.hidden_act
        if not config.experts:
            self.mlp = GatedMLP(size, config.shared_size, act, dtype=dtype)
            return
        self.mlp = MixtureOfExperts(
            size,
            config.intermediate_size,
            config.experts,
            config.experts_per_token,
            act=act,
            shared_size=config.shared_size,
            dtype=dtype,
        )

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] to the same."""
        return self.mlp(x)


def _read(config: ConfigReader) -> GraniteHybridConfig:
    config.ignore("router_aux_loss_coef mamba_chunk_size mamba_d_head init_method")
    config.require("normalization_function", "rmsnorm", "irc has RMS norms only in this family")
    bias, heads = config.flag("attention_bias"), config.integer("mamba_n_heads", 128)
    values = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    position = config.word("position_embedding_type", "")
    rope = {} if position == "rope" else {"rope": None}
    config.ignore("rope_parameters rope_theta rope_scaling")
    return read_decoder(
        config,
        GraniteHybridConfig,
        defaults={"max_position_embeddings": 2048},
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_multiplier=1 / config.number("logits_scaling", 1.0),
        layers=read_layer_types(config, config.integer("num_hidden_layers"), _TYPES),
        recurrent=RecurrentSizes(
            heads=heads,
            groups=config.integer("mamba_n_groups", 1),
            key_size=config.integer("mamba_d_state", 256),
            value_size=values // max(1, heads),
            width=config.integer("mamba_d_conv", 4),
            bias=config.flag("mamba_proj_bias"),
            conv_bias=config.flag("mamba_conv_bias", True),
            act=config.word("hidden_act", "silu"),
            limits=config.numbers("time_step_limit"),
        ),
        experts=config.integer("num_local_experts", 8),
        experts_per_token=config.integer("num_experts_per_tok", 2),
        shared_size=config.integer("shared_intermediate_size", 1024),
        **rope,
    )


def _stored(config: GraniteHybridConfig) -> Sequence[Stored]:
    layer, width = "model.layers.*.", config.shared_size
    own = f"{layer}mlp.shared_expert." if config.experts else f"{layer}mlp."
    return [
        *mamba2_stored(f"{layer}mixer.", f"{layer}mamba.", config.recurrent),
        *parts_of(own, ("gate_proj", "up_proj"), f"{layer}shared_mlp.input_linear", [width] * 2),
        Stored(f"{own}down_proj", f"{layer}shared_mlp.output_linear"),
        Stored(f"{layer}mlp.gate", f"{layer}block_sparse_moe.router.layer"),
    ]


def _alternatives(config: GraniteHybridConfig) -> Mapping[str, Ref]:
    """The experts, all of a layer in one tensor, gate and up joined."""
    refs, width = dict(tied_embeddings(config)), config.intermediate_size
    joined_shape = (config.experts, 2 * width, config.hidden_size)
    for i in range(config.num_hidden_layers if config.experts else 0):
        own, key = f"model.layers.{i}.mlp.experts.", f"model.layers.{i}.block_sparse_moe."
        joined = UnboundRef(f"{key}input_linear.weight", joined_shape)
        refs[f"{own}gate"] = joined.then(Slice((None, (0, width), None)))
        refs[f"{own}up"] = joined.then(Slice((None, (width, 2 * width), None)))
        refs[f"{own}down"] = UnboundRef(f"{key}output_linear.weight")
    return refs


GRANITE_HYBRID = register_decoder(
    "granitemoehybrid",
    ("GraniteMoeHybridForCausalLM",),
    _read,
    GraniteHybridLayer,
    _alternatives,
    _stored,
)
