"""Ministral: a Mistral with a window in some layers. Mistral AI, 2024."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import (
    DecoderConfig,
    layer_count,
    read_decoder,
    read_layer_types,
    register_decoder,
    window_types,
)


def _read(config: ConfigReader) -> DecoderConfig:
    window, count = config.number_or_none("sliding_window", 4096), layer_count(config)
    default = ["full_attention" if window is None else "sliding_attention"] * count
    types = window_types(int(window or 0))
    return read_decoder(
        config,
        defaults={"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8},
        layers=read_layer_types(config, count, types, default=default),
    )


MINISTRAL = register_decoder("ministral", ("MinistralForCausalLM",), _read)
