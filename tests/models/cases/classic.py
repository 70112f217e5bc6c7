"""Decoders of the time before Llama, with learned positions, ALiBi and layer norms."""

from __future__ import annotations

from typing import Any

from . import SIZES, Case

GPT2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
RANGE = {"initializer_range": 0.15}
CODES = ("w4a16", "int8 caches")
ABSENT = ("num_key_value_heads", "intermediate_size")
PLAIN: dict[str, Any] = {key: value for key, value in SIZES.items() if key not in ABSENT}
NEOX = PLAIN | {"intermediate_size": 80, "rotary_pct": 0.5}
OPT = PLAIN | {"ffn_dim": 80, "word_embed_proj_dim": 48, "init_std": 0.15}
FALCON = PLAIN | {"ffn_hidden_size": 80}
BLOOM = {"vocab_size": 96, "hidden_size": 48, "n_layer": 2, "seq_length": 64} | RANGE
MPT = {"vocab_size": 96, "d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 64} | RANGE

DECODERS = {
    "gpt2": Case("gpt2", GPT2 | RANGE),
    "gptj": Case("gptj", GPT2 | RANGE | {"rotary_dim": 4}),
    "gpt_neox": Case("gpt_neox", NEOX),
    "gpt_neox_in_turn": Case("gpt_neox", NEOX | {"use_parallel_residual": False}, ("tp=2",)),
    "opt": Case("opt", OPT, schemes=CODES),
    "bloom": Case("bloom", BLOOM | {"n_head": 4}),
    "bloom_six_heads": Case("bloom", BLOOM | {"n_head": 6}, ("tp=2",)),
    "falcon_one_key_head": Case("falcon", FALCON),
    "falcon_groups": Case(
        "falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, schemes=CODES
    ),
    "falcon_in_turn": Case(
        "falcon", FALCON | {"parallel_attn": False, "multi_query": False, "bias": True}, ("tp=2",)
    ),
    "mpt": Case("mpt", MPT),
}
