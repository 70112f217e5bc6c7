"""Qwen3: a decoder that normalizes the queries and keys of every head. Yang et al., 2025."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, read_windows, register_decoder


def _read(config: ConfigReader) -> DecoderConfig:
    defaults = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}
    return read_decoder(
        config,
        defaults=defaults,
        attention_bias=config.flag("attention_bias"),
        qk_norm="head",
        layers=read_windows(config),
    )


QWEN3 = register_decoder("qwen3", ("Qwen3ForCausalLM",), _read)
