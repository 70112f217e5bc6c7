"""Decoders with mixtures of experts, attention sinks and latent attention."""

from __future__ import annotations

from . import SIZES, Case

COUNTS = {"num_experts": 6, "num_experts_per_tok": 2}
MOE = SIZES | COUNTS | {"moe_intermediate_size": 24}
EXPERTS = ("tp=2", "tp=3", "pp=2", "ep=2")
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_key_value_heads": 4,
    "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
}

DECODERS = {
    "qwen2_moe": Case(
        "qwen2_moe",
        MOE
        | {"shared_expert_intermediate_size": 40, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        EXPERTS,
    ),
    "qwen3_moe": Case(
        "qwen3_moe", MOE | {"head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}
    ),
    "deepseek_v2_lite": Case(
        "deepseek_v2",
        SIZES
        | LATENT
        | {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy", "n_group": 1},
    ),
    "deepseek_v2": Case("deepseek_v2", SIZES | LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": Case("deepseek_v3", SIZES | LATENT, EXPERTS),
    "gpt_oss": Case(
        "gpt_oss",
        SIZES
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7}
        | {"swiglu_limit": 0.8, "rope_scaling": YARN | {"truncate": False}},
        EXPERTS,
    ),
    "llama4": Case(
        "llama4_text",
        SIZES
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
        | {"intermediate_size": 24, "intermediate_size_mlp": 40, "num_hidden_layers": 4}
        | {"no_rope_layer_interval": 2, "interleave_moe_layer_step": 3}
        | {"attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.3},
        EXPERTS,
    ),
    "granite_moe": Case(
        "granitemoe",
        SIZES
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 0.2}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "glm4_moe": Case(
        "glm4_moe",
        SIZES
        | {"first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "use_qk_norm": True, "attention_bias": True}
        | {"routed_scaling_factor": 1.5, "head_dim": 16},
    ),
    "olmoe": Case("olmoe", SIZES | COUNTS),
}
