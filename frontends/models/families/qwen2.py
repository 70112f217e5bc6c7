"""Qwen2: a decoder with biases on queries, keys and values. Yang et al., 2024."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, read_windows, register_decoder


def _read(config: ConfigReader) -> DecoderConfig:
    defaults = {"max_position_embeddings": 32768}
    return read_decoder(config, defaults=defaults, qkv_bias=True, layers=read_windows(config))


QWEN2 = register_decoder("qwen2", ("Qwen2ForCausalLM",), _read)
