"""Decoders with mixtures of experts, attention sinks and latent attention."""

from __future__ import annotations

from . import SIZES, Case

COUNTS = {"num_experts": 6, "num_experts_per_tok": 2}
MOE = SIZES | COUNTS | {"moe_intermediate_size": 24}
EXPERTS = ("tp=2", "tp=3", "pp=2", "ep=2")

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
    "olmoe": Case("olmoe", SIZES | COUNTS),
}
