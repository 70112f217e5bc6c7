"""Command R: attention and feed-forward of one layer norm, interleaved rope. Cohere, 2024."""

from __future__ import annotations

from typing import Any

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder


def read_cohere(config: ConfigReader, **options: Any) -> DecoderConfig:
    """The sizes of a model of Cohere."""
    defaults = {"norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    return read_decoder(
        config,
        keys={"norm_eps": "layer_norm_eps"},
        defaults=defaults,
        interleaved_rope=True,
        norm="layer",
        norm_bias=False,
        block="parallel",
        attention_bias=config.flag("attention_bias"),
        logits_multiplier=config.number("logit_scale", 0.0625),
        head_dim=None,
        **options,
    )


def _read(config: ConfigReader) -> DecoderConfig:
    qk_norm = "each_head" if config.flag("use_qk_norm") else ""
    return read_cohere(config, rope_theta=5e5, qk_norm=qk_norm)


COHERE = register_decoder("cohere", ("CohereForCausalLM",), _read)
