"""Qwen2: a decoder with biases on queries, keys and values. Yang et al., 2024."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder, require_full_attention


def _read(config: ConfigReader) -> DecoderConfig:
    require_full_attention(config)
    defaults = {"max_position_embeddings": 32768}
    return read_decoder(config, defaults=defaults, qkv_bias=True)


QWEN2 = register_decoder("qwen2", ("Qwen2ForCausalLM",), _read)
