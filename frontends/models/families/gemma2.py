"""Gemma 2: soft caps, windows in every other layer, norms on both sides. Gemma Team, 2024."""

from __future__ import annotations

from typing import Any

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, read_layer_types, register_decoder, window_types
from ..stored import renamed

GEMMA_NORMS = renamed(
    {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    }
)
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}


def read_gemma(
    config: ConfigReader, defaults: dict[str, Any], softcap: float = 0.0, **options: Any
) -> DecoderConfig:
    """The sizes of a Gemma 2 or 3; `softcap` is that of scores, `options` are others."""
    config.ignore("hidden_act")  # older files have both, and hidden_activation counts
    config.require("use_bidirectional_attention", False, "irc computes causal attention")
    hidden_size = config.integer("hidden_size")
    scalar = config.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0 or hidden_size <= 0:
        raise config.error("query_pre_attn_scalar", "expected it and hidden_size above 0")
    return read_decoder(
        config,
        keys={"hidden_act": "hidden_activation"},
        defaults=_DEFAULTS | defaults,
        norm_offset=1.0,
        block="sandwich",
        attention_bias=config.flag("attention_bias"),
        attention={"scale": scalar**-0.5, "softcap": softcap},
        embedding_multiplier=hidden_size**0.5,
        round_embedding_multiplier=True,
        **options,
    )


def _softcap(config: ConfigReader, key: str, default: float) -> float:
    return config.number(key, 0.0 if config.is_null(key) else default)


def _read(config: ConfigReader) -> DecoderConfig:
    types = window_types(config.integer("sliding_window", 4096))
    return read_gemma(
        config,
        {"max_position_embeddings": 8192},
        layers=read_layer_types(config, types, period=2),
        softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        logits_softcap=_softcap(config, "final_logit_softcapping", 30.0),
    )


GEMMA2 = register_decoder("gemma2", ("Gemma2ForCausalLM",), _read, stored=GEMMA_NORMS)
