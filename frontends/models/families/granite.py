"""Granite: a Llama with multipliers of embeddings, scores, residuals and logits. IBM, 2024."""

from __future__ import annotations

from typing import Any

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder


def read_granite(config: ConfigReader, kind: type[Any] = DecoderConfig, **more: Any) -> Any:
    """The sizes of a Granite, and `more` fields, which are not read."""
    scaling = config.number("logits_scaling", 1.0)
    if scaling <= 0:
        raise config.error("logits_scaling", "expected a number above 0")
    return read_decoder(
        config,
        kind,
        defaults={"max_position_embeddings": 2048},
        attention_bias=config.flag("attention_bias"),
        attention={"scale": config.number("attention_multiplier", 1.0)},
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_multiplier=1 / scaling,
        **more,
    )


def _read(config: ConfigReader) -> DecoderConfig:
    return read_granite(config, mlp_bias=config.flag("mlp_bias"))


GRANITE = register_decoder("granite", ("GraniteForCausalLM",), _read)
