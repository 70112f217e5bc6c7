"""Qwen3.5 (text), with or without experts: three of four layers are gated delta nets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...layers import Routing
from ...layers.recurrent import GatedDeltaNet, RecurrentSizes
from ..config_reader import ConfigReader
from ..decoder import read_decoder, read_layer_types, register_decoder
from ..family import register_inside
from ..hybrid import HybridConfig, HybridLayer
from ..mixture import read_mixture
from ..stored import ATTENTION, LAYER, QKV, Stored, in_turn, joined

_TYPES = {"linear_attention": {"mixer": GatedDeltaNet}, "full_attention": {"mixer": None}}


def _read(config: ConfigReader, **more: Any) -> HybridConfig:
    config.ignore(
        "mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings mlp_only_layers"
    )
    config.require("attn_output_gate", True, "irc computes the gate of Qwen3.5's attention")
    period = config.integer("full_attention_interval", 4)
    return read_decoder(
        config,
        HybridConfig,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "head_dim": 256},
        rotary_fraction=0.25,
        norm_offset=1.0,
        qk_norm="head",
        attention_bias=config.flag("attention_bias"),
        attention={"gate": True},
        layers=read_layer_types(config, _TYPES, period),
        recurrent=RecurrentSizes(
            heads=config.integer("linear_num_value_heads", 32),
            groups=config.integer("linear_num_key_heads", 16),
            key_size=config.integer("linear_key_head_dim", 128),
            value_size=config.integer("linear_value_head_dim", 128),
            width=config.integer("linear_conv_kernel_dim", 4),
            act=config.word("hidden_act", "silu"),
        ),
        **more,
    )


def _read_moe(config: ConfigReader) -> HybridConfig:
    config.ignore("intermediate_size")
    shared = config.integer("shared_expert_intermediate_size", 512)
    mixture = read_mixture(config, shared_size=shared, shared_gate=True, routing=Routing(True))
    return _read(config, mixture=mixture, intermediate_size=mixture.intermediate_size)


def _stored(config: HybridConfig) -> Sequence[Stored]:
    own, key = f"{LAYER}mixer.", f"{LAYER}linear_attn."
    sizes, size = config.recurrent, config.head_size
    parts, total = in_turn(sizes.keys, sizes.keys, sizes.values), config.num_attention_heads * size
    queries = [(2 * at, 2 * at + size) for at in range(0, total, size)]  # each before its gate
    gates = [(end, end + size) for _, end in queries]
    return [
        *joined(own, QKV, f"{key}in_proj_qkv", parts),
        *joined(own, "q_conv k_conv v_conv", f"{key}conv1d", parts),
        Stored(f"{own}z_proj", f"{key}in_proj_z"),
        Stored(f"{own}dt_proj", f"{key}in_proj_a"),
        Stored(f"{own}beta_proj", f"{key}in_proj_b"),
        Stored(own[:-1], key[:-1]),
        *joined(ATTENTION, "q_proj gate_proj", f"{ATTENTION}q_proj", [queries, gates]),
    ]


for _kind, _reader in (("", _read), ("_moe", _read_moe)):
    _name, _type = f"Qwen3_5{_kind[1:].capitalize()}", f"qwen3_5{_kind}"
    _text = register_decoder(
        f"{_type}_text", (f"{_name}ForCausalLM",), _reader, HybridLayer, stored=_stored
    )
    register_inside(_text, _type, f"{_name}ForConditionalGeneration", "model.visual.* mtp.*")
