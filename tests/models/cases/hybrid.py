"""Decoders of which some layers have a recurrence with fixed states in place of attention."""

from __future__ import annotations

from typing import Any

from . import SIZES, Case

QWEN3_5 = SIZES | {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

GRANITE = SIZES | {
    "num_attention_heads": 6,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 6,
    "mamba_d_state": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}

# config.json of a model with images has the sizes of the text in an object of its own
IMAGES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}}


def _with_images(kind: str, sizes: dict[str, Any]) -> Case:
    vision = IMAGES | {"out_hidden_size": 48, "num_position_embeddings": 4}
    keys = {"text_config": sizes | MROPE, "vision_config": vision}
    return Case(
        f"qwen3_5{kind.lower()}", keys, ("tp=2",), f"Qwen3_5{kind[1:]}ForConditionalGeneration"
    )


DECODERS = {
    "qwen3_5": Case("qwen3_5_text", QWEN3_5, schemes=("int8 caches",)),
    "qwen3_5_images": _with_images("", QWEN3_5),
    "qwen3_5_moe": Case("qwen3_5_moe_text", QWEN3_5 | EXPERTS, ("tp=3", "pp=2")),
    "qwen3_5_moe_images": _with_images("_Moe", QWEN3_5 | EXPERTS),
    "granite_hybrid": Case(
        "granitemoehybrid", GRANITE | {"num_local_experts": 0}, schemes=("w4a16", "int8 caches")
    ),
    "granite_hybrid_experts": Case(
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 5, "mamba_n_groups": 2, "position_embedding_type": "rope"},
        ("tp=2", "tp=3"),
    ),
}
