"""OLMo: layer norms without weights, and bounds of queries and keys. Groeneveld et al., 2024."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder


def _read(config: ConfigReader) -> DecoderConfig:
    return read_decoder(
        config,
        defaults={"max_position_embeddings": 2048},
        norm="layer",
        norm_affine=False,
        norm_eps=1e-5,
        attention_bias=config.flag("attention_bias"),
        attention={"clip": config.number("clip_qkv", 0.0)},
    )


OLMO = register_decoder("olmo", ("OlmoForCausalLM",), _read)
