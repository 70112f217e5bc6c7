"""The config.json of mixtures of experts as they are on the Hub."""

from __future__ import annotations

import json
from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest

import irc

from .test_hub_configs import config, read

pytestmark = pytest.mark.oracle
MOE = "norm_topk_prob=true output_router_logits=false router_aux_loss_coef=0.001 "
QWEN = MOE + "decoder_sparse_step=1 rope_theta=1000000.0 sliding_window=null "
QWEN += "use_sliding_window=false"
LATENT = MOE + "ep_size=1 kv_lora_rank=512 moe_layer_freq=1 n_group=1 pretraining_tp=1 "
LATENT += "qk_nope_head_dim=128 qk_rope_head_dim=64 topk_group=1 v_head_dim=128"
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
LLAMA4 = MOE.partition(" ")[2] + "attention_chunk_size=8192 attn_scale=0.1 floor_scale=8192 "
LLAMA4 += "attn_temperature_tuning=true for_llm_compressor=false head_dim=128 use_qk_norm=true "
LLAMA4 += "intermediate_size_mlp=16384 num_experts_per_tok=1 rope_theta=500000.0 "
LLAMA4 += "router_jitter_noise=0.0 rms_norm_eps=1e-05"

HUB: dict[str, Any] = {
    "mistralai/Mixtral-8x7B-v0.1": config(
        *("MixtralForCausalLM", "mixtral", "32000 4096 14336 32 32 8 32768"),
        "num_local_experts=8 num_experts_per_tok=2 output_router_logits=false sliding_window=null "
        "rms_norm_eps=1e-05 rope_theta=1000000.0 router_aux_loss_coef=0.02",
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": config(
        *("Qwen2MoeForCausalLM", "qwen2_moe", "151936 2048 5632 24 16 16 8192"),
        f"{QWEN} max_window_layers=21 moe_intermediate_size=1408 num_experts=60 "
        "num_experts_per_tok=4 shared_expert_intermediate_size=5632",
    ),
    "Qwen/Qwen3-30B-A3B": config(
        *("Qwen3MoeForCausalLM", "qwen3_moe", "151936 2048 6144 48 32 4 40960"),
        f"{QWEN} head_dim=128 max_window_layers=48 mlp_only_layers=[] moe_intermediate_size=768 "
        "num_experts=128 num_experts_per_tok=8",
    ),
    "allenai/OLMoE-1B-7B-0924": config(
        *("OlmoeForCausalLM", "olmoe", "50304 2048 1024 16 16 16 4096"),
        f"{MOE} clip_qkv=null num_experts=64 num_experts_per_tok=8 rms_norm_eps=1e-05",
    ),
    "deepseek-ai/DeepSeek-V2-Lite": config(
        *("DeepseekV2ForCausalLM", "deepseek_v2", "102400 2048 10944 27 16 16 163840"),
        f"{LATENT} aux_loss_alpha=0.001 first_k_dense_replace=1 moe_intermediate_size=1408 "
        "n_routed_experts=64 n_shared_experts=2 num_experts_per_tok=6 norm_topk_prob=false "
        "q_lora_rank=null routed_scaling_factor=1.0 scoring_func=softmax seq_aux=true "
        "topk_method=greedy",
        rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "type": "yarn"},
    ),
    "deepseek-ai/DeepSeek-V3": config(
        *("DeepseekV3ForCausalLM", "deepseek_v3", "129280 7168 18432 61 128 128 163840"),
        f"{LATENT} first_k_dense_replace=3 moe_intermediate_size=2048 n_group=8 topk_group=4 "
        "n_routed_experts=256 n_shared_experts=1 num_experts_per_tok=8 q_lora_rank=1536 "
        "num_nextn_predict_layers=1 routed_scaling_factor=2.5 scoring_func=sigmoid "
        "topk_method=noaux_tc",
        rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
    ),
    "openai/gpt-oss-20b": config(
        *("GptOssForCausalLM", "gpt_oss", "201088 2880 2880 24 64 8 131072"),
        f"{MOE.partition(' ')[2]} attention_bias=true experts_per_token=4 head_dim=64 "
        "initial_context_length=4096 num_experts_per_tok=4 num_local_experts=32 "
        "rms_norm_eps=1e-05 rope_theta=150000 sliding_window=128 swiglu_limit=7.0",
        layer_types=["sliding_attention", "full_attention"] * 12,
        rope_scaling=YARN | {"factor": 32.0, "rope_type": "yarn", "truncate": False},
    ),
    "zai-org/GLM-4.5-Air": config(
        *("Glm4MoeForCausalLM", "glm4_moe", "151552 4096 10944 46 96 8 131072"),
        f"{MOE} attention_bias=true first_k_dense_replace=1 head_dim=128 n_group=1 topk_group=1 "
        "moe_intermediate_size=1408 n_routed_experts=128 n_shared_experts=1 "
        "num_experts_per_tok=8 num_nextn_predict_layers=1 partial_rotary_factor=0.5 "
        "rms_norm_eps=1e-05 rope_theta=1000000 routed_scaling_factor=1.0 use_qk_norm=false",
    ),
    "meta-llama/Llama-4-Scout-17B-16E": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": config(
            *("Llama4ForCausalLM", "llama4_text", "202048 5120 8192 48 40 8 10485760"),
            f"{LLAMA4} interleave_moe_layer_step=1 no_rope_layers=[] num_local_experts=16",
            rope_scaling={
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        ),
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
    },
}


@pytest.mark.parametrize("name", HUB)
def test_old_and_new_keys_mean_the_same(name: str) -> None:
    copy = deepcopy(HUB[name])  # transformers writes into the objects that it gets
    new = import_module("transformers").AutoConfig.for_model(copy.pop("model_type"), **copy)
    assert read(json.loads(new.to_json_string())) == read(HUB[name])


V2, V3, OLMOE = (
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "allenai/OLMoE-1B-7B-0924",
)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (OLMOE, {"clip_qkv": 3.0}, "clips queries and keys before their norm only"),
    (OLMOE, {"num_experts_per_tok": 65}, "65 lies outside 1 to num_experts 64"),
    (V2, {"norm_topk_prob": True}, "scales no weights of experts in DeepSeek-V2"),
    (V2, {"moe_layer_freq": 2}, "experts in every layer behind the dense ones"),
    (V3, {"scoring_func": "softmax"}, "reads sigmoid in DeepSeek-V3"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_what_a_family_does_not_compute_is_an_error(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(irc.Error, match=message):
        read(HUB[name] | changes)
