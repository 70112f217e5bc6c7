"""OLMo 2: norms behind attention and feed-forward, and of queries and keys. Walsh et al., 2024."""

from __future__ import annotations

from typing import Any

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import renamed

OLMO2_NORMS = renamed(
    {
        "attention_output_norm": "post_attention_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    }
)


def read_olmo2(config: ConfigReader, **options: Any) -> DecoderConfig:
    """The sizes of an OLMo 2."""
    return read_decoder(
        config,
        defaults={"norm_eps": 1e-5, "max_position_embeddings": 2048},
        block="post",
        qk_norm="all_heads",
        attention_bias=config.flag("attention_bias"),
        **options,
    )


OLMO2 = register_decoder("olmo2", ("Olmo2ForCausalLM",), read_olmo2, stored=OLMO2_NORMS)
