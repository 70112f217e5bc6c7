"""SmolLM3: a decoder without positions in every fourth layer. Hugging Face, 2025."""

from __future__ import annotations

from typing import Any

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, read_windows, register_decoder


def _read(config: ConfigReader) -> DecoderConfig:
    count = config.layers()
    interval = config.integer("no_rope_layer_interval", 4)
    if interval < 1:
        raise config.error("no_rope_layer_interval", "expected a number above 0")
    has_rope = config.numbers("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    if len(has_rope) < count:
        raise config.error("no_rope_layers", f"expected a number for each of {count} layers")
    windows = read_windows(config, lambda i: not has_rope[i]) or [dict[str, Any]()] * count
    layers = [
        options if has_rope[i] else {**options, "rope": None} for i, options in enumerate(windows)
    ]
    return read_decoder(
        config,
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4},
        rope_theta=2e6,
        layers=tuple(layers),
        attention_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )


SMOLLM3 = register_decoder("smollm3", ("SmolLM3ForCausalLM",), _read)
