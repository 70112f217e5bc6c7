"""Llama. Touvron et al., 2023."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder


def _read(config: ConfigReader) -> DecoderConfig:
    return read_decoder(
        config,
        defaults={"max_position_embeddings": 2048},
        attention_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )


LLAMA = register_decoder("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), _read)
