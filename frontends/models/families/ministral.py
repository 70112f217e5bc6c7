"""Ministral: a Mistral with a window in some layers. Mistral AI, 2024."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, read_layer_types, register_decoder, window_types


def _read(config: ConfigReader) -> DecoderConfig:
    no_window = config.is_null("sliding_window")
    types = window_types(config.integer("sliding_window", 0 if no_window else 4096))
    default = ["full_attention" if no_window else "sliding_attention"] * config.layers()
    return read_decoder(
        config,
        defaults={"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8},
        layers=read_layer_types(config, types, default=default),
    )


MINISTRAL = register_decoder("ministral", ("MinistralForCausalLM",), _read)
