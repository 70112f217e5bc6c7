"""Ministral 3: a Mistral whose queries grow with their positions. Mistral AI, 2025."""

from __future__ import annotations

from ...layers import QueryGrowth
from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..rope_config import read_rope

_RATE, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def read_ministral3(config: ConfigReader) -> DecoderConfig:
    """The sizes of a Ministral 3."""
    rope = ConfigReader(config.inner("rope_parameters"), "config.json: rope_parameters")
    rate, length = rope.number(_RATE), rope.integer(_LENGTH)
    if length < 1:
        raise rope.error(_LENGTH, "expected a number of at least 1")
    head_dim, context = config.integer("head_dim", 128), config.integer("max_position_embeddings")
    others = f"{_RATE} max_position_embeddings"
    return read_decoder(
        config,
        defaults={"norm_eps": 1e-5, "num_key_value_heads": 8},
        head_dim=head_dim,
        rope=read_rope(config, head_dim, context, 1e6, others=others),
        attention={"growth": QueryGrowth(length, rate)},
        sliding_window=config.integer("sliding_window", 0),
    )


MINISTRAL3 = register_decoder("ministral3", ("Ministral3ForCausalLM",), read_ministral3)
