"""Qwen3-MoE: Qwen3 with mixtures of experts. Yang et al., 2025."""

from __future__ import annotations

from ...layers import Routing
from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, read_windows, register_decoder
from ..mixture import read_mixture, read_sparse_step


def _read(config: ConfigReader) -> DecoderConfig:
    return read_decoder(
        config,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4},
        attention_bias=config.flag("attention_bias"),
        qk_norm="head",
        mixture=read_mixture(config, routing=Routing(config.flag("norm_topk_prob"))),
        layers=read_sparse_step(config, read_windows(config, lambda i: True)),
    )


QWEN3_MOE = register_decoder("qwen3_moe", ("Qwen3MoeForCausalLM",), _read)
