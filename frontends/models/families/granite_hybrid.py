"""Granite 4 hybrid: most layers are Mamba-2, with or without experts. IBM, 2025."""

from __future__ import annotations

from collections.abc import Sequence

from ...layers.recurrent import Mamba2
from ..config_reader import ConfigReader
from ..decoder import read_layer_types, register_decoder
from ..hybrid import HybridConfig, HybridLayer, mamba2_stored, read_mamba2
from ..mixture import read_mixture
from ..stored import LAYER, MLP, Stored, in_turn, joined
from .granite import read_granite
from .granite_moe import stored_granite_moe

_MIXERS = {"linear_attention": Mamba2, "mamba": Mamba2, "full_attention": None, "attention": None}
_TYPES = {name: {"mixer": mixer} for name, mixer in _MIXERS.items()}


def _read(config: ConfigReader) -> HybridConfig:
    config.ignore("router_aux_loss_coef output_router_logits init_method num_experts_per_tok")
    config.ignore("intermediate_size rope_parameters rope_theta rope_scaling")
    config.require("normalization_function", "rmsnorm", "irc has RMS norms only in this family")
    width, experts = config.integer("shared_intermediate_size", 1024), "num_local_experts"
    no_rope = {} if config.word("position_embedding_type", "") == "rope" else {"rope": None}
    mixture = None
    if config.integer(experts, 8) > 0:
        mixture = read_mixture(config, "intermediate_size", experts, (8, 2), shared_size=width)
    return read_granite(
        config,
        HybridConfig,
        intermediate_size=width,
        layers=read_layer_types(config, _TYPES),
        recurrent=read_mamba2(config, "mamba_"),
        mixture=mixture,
        **no_rope,
    )


def _stored(config: HybridConfig) -> Sequence[Stored]:
    own, key = MLP if config.mixture is None else f"{MLP}shared_expert.", f"{LAYER}shared_mlp."
    widths = in_turn(config.intermediate_size, config.intermediate_size)
    return [
        *mamba2_stored(f"{LAYER}mixer.", f"{LAYER}mamba.", config.recurrent),
        *stored_granite_moe(config),
        *joined(own, "gate_proj up_proj", f"{key}input_linear", widths),
        Stored(f"{own}down_proj", f"{key}output_linear"),
    ]


GRANITE_HYBRID = register_decoder(
    "granitemoehybrid", ("GraniteMoeHybridForCausalLM",), _read, HybridLayer, stored=_stored
)
