"""Granite 4 hybrid: most layers are Mamba-2, with or without experts. IBM, 2025."""

from __future__ import annotations

from collections.abc import Sequence

from ...layers.recurrent import Mamba2
from ..config_reader import ConfigReader
from ..decoder import read_decoder, read_layer_types, register_decoder
from ..hybrid import HybridConfig, HybridLayer, mamba2_stored, parts_of, read_mamba2
from ..mixture import read_mixture
from ..stored import Stored

_MAMBA, _ATTENTION = {"mixer": Mamba2}, {"mixer": None}
_NAMES = ("linear_attention", "mamba", "full_attention", "attention")
_TYPES = dict(zip(_NAMES, (_MAMBA, _MAMBA, _ATTENTION, _ATTENTION), strict=True))


def _read(config: ConfigReader) -> HybridConfig:
    config.ignore("router_aux_loss_coef output_router_logits init_method num_experts_per_tok")
    config.ignore("intermediate_size rope_parameters rope_theta rope_scaling")
    config.require("normalization_function", "rmsnorm", "irc has RMS norms only in this family")
    bias, scaling = config.flag("attention_bias"), config.number("logits_scaling", 1.0)
    width, experts = config.integer("shared_intermediate_size", 1024), "num_local_experts"
    if scaling <= 0:
        raise config.error("logits_scaling", "expected a number above 0")
    has_rope = config.word("position_embedding_type", "") == "rope"
    has_experts = config.integer(experts, 8) > 0
    return read_decoder(
        config,
        HybridConfig,
        defaults={"max_position_embeddings": 2048},
        intermediate_size=width,
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_multiplier=1 / scaling,
        layers=read_layer_types(config, config.integer("num_hidden_layers"), _TYPES),
        recurrent=read_mamba2(config, "mamba_"),
        mixture=read_mixture(config, "intermediate_size", experts, (8, 2), shared_size=width)
        if has_experts
        else None,
        **({} if has_rope else {"rope": None}),
    )


def _stored(config: HybridConfig) -> Sequence[Stored]:
    layer, shared = "model.layers.*.", config.intermediate_size
    mlp, moe = f"{layer}mlp.", f"{layer}block_sparse_moe."
    own, entries = mlp, mamba2_stored(f"{layer}mixer.", f"{layer}mamba.", config.recurrent)
    if config.mixture is not None:
        own, width = f"{mlp}shared_expert.", config.mixture.intermediate_size
        joined = f"{moe}input_linear.weight"
        entries += [
            *parts_of(f"{mlp}experts.", ("gate", "up"), joined, [width] * 2, 1),
            Stored(f"{mlp}experts.down", f"{moe}output_linear.weight"),
            Stored(f"{mlp}gate", f"{moe}router.layer"),
        ]
    return [
        *entries,
        *parts_of(own, ("gate_proj", "up_proj"), f"{layer}shared_mlp.input_linear", [shared] * 2),
        Stored(f"{own}down_proj", f"{layer}shared_mlp.output_linear"),
    ]


GRANITE_HYBRID = register_decoder(
    "granitemoehybrid", ("GraniteMoeHybridForCausalLM",), _read, HybridLayer, stored=_stored
)
