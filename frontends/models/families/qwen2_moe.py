"""Qwen2-MoE: experts, and a shared one with a gate of its own. Yang et al., 2024."""

from __future__ import annotations

from ...layers import Routing
from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, read_windows, register_decoder
from ..mixture import read_mixture, read_sparse_step


def _read(config: ConfigReader) -> DecoderConfig:
    mixture = read_mixture(
        config,
        routing=Routing(config.flag("norm_topk_prob")),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    last = config.integer("max_window_layers", 28)
    windows = read_windows(config, lambda i: i < last and (i + 1) % 2)
    return read_decoder(
        config,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 16},
        qkv_bias=config.flag("qkv_bias", True),
        mixture=mixture,
        layers=read_sparse_step(config, windows),
    )


QWEN2_MOE = register_decoder("qwen2_moe", ("Qwen2MoeForCausalLM",), _read)
