"""Gemma 3, its text: five layers with a window to one without. Gemma Team, 2025."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_layer_types, register_decoder, window_types
from ..family import register_inside
from ..rope_config import read_rope
from .gemma2 import GEMMA_NORMS, read_gemma


def _read(config: ConfigReader, **defaults: int) -> DecoderConfig:
    config.require("attn_logit_softcapping", None, "Gemma 3 has no soft cap of scores")
    sizes = read_gemma(
        config,
        defaults={"max_position_embeddings": 131072} | defaults,
        rope_theta=1e6,
        qk_norm="head",
        logits_softcap=config.number("final_logit_softcapping", 0.0),
    )
    rope = read_rope(
        config,
        sizes.head_size,
        sizes.max_position_embeddings,
        1e4,
        layer_type="sliding_attention",
        local_theta="rope_local_base_freq",
    )
    types = window_types(config.integer("sliding_window", 4096), rope=rope)
    config.ignore("_sliding_window_pattern")  # beside layer_types
    period = config.integer("sliding_window_pattern", 6)
    layers = read_layer_types(config, types, period)
    return replace(sizes, layers=layers)


def _read_text(config: ConfigReader) -> DecoderConfig:
    config.require("final_logit_softcapping", None, "models with a vision tower have no soft cap")
    return _read(config, vocab_size=262208, num_attention_heads=8)


TEXT = register_decoder("gemma3_text", ("Gemma3ForCausalLM",), _read, stored=GEMMA_NORMS)
_NAME, _OTHERS = "Gemma3ForConditionalGeneration", "*vision_tower.* *multi_modal_projector.*"
GEMMA3 = register_inside(replace(TEXT, read=_read_text), "gemma3", _NAME, _OTHERS)
