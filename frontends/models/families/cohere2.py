"""Command R7B and A: windows with rope, and every fourth layer without both. Cohere, 2025."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_layer_types, register_decoder, window_types
from .cohere import read_cohere

# what describes the only shape of this family
_FIXED = {
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("use_embedding_sharing use_parallel_embedding")
    for key, value in _FIXED.items():
        config.require(key, value, f"expected {value}")
    period = config.integer("sliding_window_pattern", config.integer("layer_switch", 4))
    sizes = read_cohere(config)
    config.require("head_dim", sizes.head_size, "expected hidden_size / num_attention_heads")
    types = window_types(config.integer("sliding_window", 4096), rope=sizes.rope)
    layers = read_layer_types(config, types, period)
    return replace(sizes, rope=None, layers=layers)


COHERE2 = register_decoder("cohere2", ("Cohere2ForCausalLM",), _read)
