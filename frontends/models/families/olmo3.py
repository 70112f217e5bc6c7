"""OLMo 3: OLMo 2 with windows in three of four layers. Olmo et al., 2025."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_layer_types, register_decoder, window_types
from ..rope_config import read_rope
from .olmo2 import OLMO2_NORMS, read_olmo2


def _read(config: ConfigReader) -> DecoderConfig:
    sizes = read_olmo2(config, rope_theta=5e5)
    context, local = sizes.max_position_embeddings, "sliding_attention"
    rope = read_rope(config, sizes.head_size, context, 5e5, None, local, local_theta="rope_theta")
    types = window_types(config.integer("sliding_window", 4096), rope=rope)
    layers = read_layer_types(config, types, period=4)
    return replace(sizes, layers=layers)


OLMO3 = register_decoder("olmo3", ("Olmo3ForCausalLM",), _read, stored=OLMO2_NORMS)
