"""Mistral: a decoder whose attention may be limited to a sliding window. Jiang et al., 2023."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder


def _read(config: ConfigReader) -> DecoderConfig:
    return read_decoder(
        config,
        defaults={"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8},
        sliding_window=config.integer("sliding_window", 0),
    )


MISTRAL = register_decoder("mistral", ("MistralForCausalLM",), _read)
