"""Phi-3 and Phi-4: a decoder whose checkpoints have merged products. Abdin et al., 2024."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import ATTENTION, MLP, QKV, Stored, in_turn, joined


def _read(config: ConfigReader) -> DecoderConfig:
    for key in ("full_attn_mod", "interpolate_factor"):
        config.require(key, 1, "expected 1, which has no effect")
    return read_decoder(
        config,
        defaults={"norm_eps": 1e-5, "max_position_embeddings": 4096},
        rotary_fraction=1.0,
        sliding_window=config.integer("sliding_window", 0),
    )


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    queries, keys = (n * config.head_size for n in (config.num_attention_heads, config.kv_heads))
    width = config.intermediate_size
    return [
        *joined(ATTENTION, QKV, f"{ATTENTION}qkv_proj", in_turn(queries, keys, keys)),
        *joined(MLP, "gate_proj up_proj", f"{MLP}gate_up_proj", in_turn(width, width)),
    ]


PHI3 = register_decoder("phi3", ("Phi3ForCausalLM",), _read, stored=_stored)
