"""GLM-4 of 2024: interleaved rope of half of a head. GLM Team, 2024."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import MLP, Stored, in_turn, joined


def read_glm(config: ConfigReader, **options: Any) -> DecoderConfig:
    """The sizes of a GLM."""
    defaults = {
        "norm_eps": 1.5625e-7,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
    }
    return read_decoder(
        config,
        defaults=defaults,
        rotary_fraction=0.5,
        interleaved_rope=True,
        qkv_bias=config.flag("attention_bias", True),
        **options,
    )


def stored_glm(config: DecoderConfig) -> Sequence[Stored]:
    """The joined projections of gate and up."""
    width = config.intermediate_size
    return joined(MLP, "gate_proj up_proj", f"{MLP}gate_up_proj", in_turn(width, width))


GLM = register_decoder("glm", ("GlmForCausalLM",), read_glm, stored=stored_glm)
