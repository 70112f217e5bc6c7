"""The config.json of models as they are on the Hub, whose keys are older than transformers 5."""

from __future__ import annotations

import json
from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest

import irc
from irc.frontends.models import find_family

pytestmark = pytest.mark.oracle
NAMES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads max_position_embeddings"
)
COMMON = (  # keys that nearly every file has
    "attention_bias=false attention_dropout=0.0 bos_token_id=1 eos_token_id=[2,3] hidden_act=silu "
    "initializer_range=0.02 tie_word_embeddings=false torch_dtype=bfloat16 use_cache=true"
)


def config(architecture: str, model_type: str, sizes: str, keys: str, **more: Any) -> Any:
    """A config.json: numbers by NAMES, and keys as `key=value`, whose value is JSON or a word."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    pairs = [pair.partition("=") for pair in f"{COMMON} {keys}".split()]
    values = {key: value(text) for key, _, text in pairs}
    numbers = dict(zip(NAMES.split(), map(int, sizes.split()), strict=True))
    if "rope_parameters" not in more:
        values = {"rope_scaling": None, "rope_theta": 10000.0} | values
    return {"architectures": [architecture], "model_type": model_type} | numbers | values | more


GEMMA = "hidden_activation=gelu_pytorch_tanh head_dim=256 tie_word_embeddings=true"
GEMMA3 = f"{GEMMA} query_pre_attn_scalar=256 cache_implementation=hybrid"
GEMMA4 = f"{GEMMA} enable_moe_block=false global_head_dim=512 num_experts=null hidden_act=null "
GEMMA4 += "final_logit_softcapping=30.0 vocab_size_per_layer_input=262144"
LOCAL = {"rope_theta": 10000.0, "rope_type": "default"}
FULL = {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}
ROPES = {"full_attention": FULL, "sliding_attention": LOCAL}
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 24 + [40.0] * 24}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
YARN |= {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
GROWING = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
GROWING |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GROWING |= {"llama_4_scaling_beta": 0.1, "rope_theta": 1000000.0, "type": "yarn"}
SMOLLM3 = "max_window_layers=28 no_rope_layer_interval=4 pretraining_tp=2 rope_theta=5000000.0 "
SMOLLM3 += "sliding_window=null use_sliding_window=false mlp_bias=false"
R7B = "cache_implementation=hybrid head_dim=128 layer_norm_eps=1e-05 layer_switch=4 "
R7B += "logit_scale=0.25 order_of_interleaved_layers=local_attn_first rotary_pct=1.0 "
R7B += "position_embedding_type=rope_gptj rope_theta=50000 sliding_window=4096 "
R7B += "sliding_window_pattern=4 use_embedding_sharing=true use_gated_activation=true "
R7B += "use_parallel_block=true use_parallel_embedding=true"

HUB: dict[str, Any] = {
    "google/gemma-2-2b": config(
        *("Gemma2ForCausalLM", "gemma2", "256000 2304 9216 26 8 4 8192"),
        f"{GEMMA3} attn_logit_softcapping=50.0 final_logit_softcapping=30.0 sliding_window=4096",
    ),
    "google/gemma-3-1b-it": config(
        *("Gemma3ForCausalLM", "gemma3_text", "262144 1152 6912 26 4 1 32768"),
        f"{GEMMA3} attn_logit_softcapping=null final_logit_softcapping=null rope_theta=1000000 "
        "rope_local_base_freq=10000 sliding_window=512 sliding_window_pattern=6",
    ),
    "google/gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
    "google/gemma-4-E2B-it": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": config(
            *("Gemma4ForCausalLM", "gemma4_text", "262144 1536 6144 35 8 1 131072"),
            f"{GEMMA4} hidden_size_per_layer_input=256 num_kv_shared_layers=20 sliding_window=512 "
            "use_double_wide_mlp=true num_global_key_value_heads=null attention_k_eq_v=false",
            layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
            rope_parameters=ROPES,
        ),
        "vision_config": {"hidden_size": 768, "model_type": "gemma4_vision"},
    },
    "google/gemma-4-31B": config(
        *("Gemma4ForCausalLM", "gemma4_text", "262144 5376 21504 60 32 16 262144"),
        f"{GEMMA4} hidden_size_per_layer_input=0 sliding_window=1024 attention_k_eq_v=true "
        "num_global_key_value_heads=4 use_bidirectional_attention=vision",
        rope_parameters=ROPES,
    ),
    "mistralai/Ministral-3-8B-Instruct-2512": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "text_config": config(
            *("MistralForCausalLM", "ministral3", "131072 4096 14336 34 32 8 262144"),
            "head_dim=128 sliding_window=null rms_norm_eps=1e-05",
            rope_parameters=GROWING,
        ),
        "tie_word_embeddings": False,
    },
    "microsoft/phi-2": config(
        *("PhiForCausalLM", "phi", "51200 2560 10240 32 32 32 2048"),
        "embd_pdrop=0.0 layer_norm_eps=1e-05 partial_rotary_factor=0.4 qk_layernorm=false",
    ),
    "microsoft/Phi-3-mini-4k-instruct": config(
        *("Phi3ForCausalLM", "phi3", "32064 3072 8192 32 32 32 4096"),
        "original_max_position_embeddings=4096 resid_pdrop=0.0 sliding_window=2047",
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
    ),
    "microsoft/Phi-4-mini-instruct": config(
        *("Phi3ForCausalLM", "phi3", "200064 3072 8192 32 24 8 131072"),
        "full_attn_mod=1 interpolate_factor=1 lm_head_bias=false mlp_bias=false "
        "original_max_position_embeddings=4096 partial_rotary_factor=0.75 sliding_window=262144",
        rope_scaling=LONG,
    ),
    "allenai/OLMo-1B-hf": config(
        *("OlmoForCausalLM", "olmo", "50304 2048 8192 16 16 16 2048"), "clip_qkv=null"
    ),
    "allenai/OLMo-2-1124-7B": config(
        *("Olmo2ForCausalLM", "olmo2", "100352 4096 11008 32 32 32 4096"), "rope_theta=500000"
    ),
    "allenai/Olmo-3-7B-Instruct": config(
        *("Olmo3ForCausalLM", "olmo3", "100278 4096 11008 32 32 32 65536"),
        "rope_theta=500000 sliding_window=4096",
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        rope_scaling=YARN,
    ),
    "HuggingFaceTB/SmolLM3-3B": config(
        *("SmolLM3ForCausalLM", "smollm3", "128256 2048 11008 36 16 4 65536"),
        SMOLLM3,
        layer_types=["full_attention"] * 36,
        no_rope_layers=[1, 1, 1, 0] * 9,
    ),
    "ibm-granite/granite-3.3-2b-instruct": config(
        *("GraniteForCausalLM", "granite", "49159 2048 8192 40 32 8 131072"),
        "attention_multiplier=0.015625 embedding_multiplier=12.0 logits_scaling=8.0 "
        "mlp_bias=false residual_multiplier=0.22 rope_theta=10000000.0 rms_norm_eps=1e-05",
    ),
    "THUDM/GLM-4-9B-0414": config(
        *("Glm4ForCausalLM", "glm4", "151552 4096 13696 40 32 2 32768"),
        "head_dim=128 pad_token_id=151329 partial_rotary_factor=0.5 rms_norm_eps=1e-05",
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": config(
        *("Cohere2ForCausalLM", "cohere2", "256000 4096 14336 32 32 8 8192"), R7B
    ),
    "bigcode/starcoder2-3b": config(
        *("Starcoder2ForCausalLM", "starcoder2", "49152 3072 12288 30 24 2 16384"),
        "embedding_dropout=0.1 layer_norm_epsilon=1e-05 mlp_type=default norm_epsilon=1e-05 "
        "norm_type=layer_norm residual_dropout=0.1 rope_theta=999999.4420358813 "
        "sliding_window=4096 use_bias=true",
    ),
    "stabilityai/stablelm-2-1_6b": config(
        *("StableLmForCausalLM", "stablelm", "100352 2048 5632 24 32 32 4096"),
        "layer_norm_eps=1e-05 partial_rotary_factor=0.25 use_qkv_bias=true",
    ),
    "Qwen/a-model-with-windows": config(
        *("Qwen2ForCausalLM", "qwen2", "151936 1536 8960 28 12 2 32768"),
        "max_window_layers=21 sliding_window=4096 use_sliding_window=true",
    ),
}


def read(values: dict[str, Any]) -> Any:
    """The sizes that irc reads."""
    return find_family(values).read_config(values)


@pytest.mark.parametrize("name", HUB)
def test_old_and_new_keys_mean_the_same(name: str) -> None:
    copy = deepcopy(HUB[name])  # transformers writes into the objects that it gets
    new = import_module("transformers").AutoConfig.for_model(copy.pop("model_type"), **copy)
    assert read(json.loads(new.to_json_string())) == read(HUB[name])


MINISTRAL = "mistralai/Ministral-3-8B-Instruct-2512"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("google/gemma-2-2b", {"use_bidirectional_attention": True}, "computes causal attention"),
    ("google/gemma-2-2b", {"layer_types": ["local"] * 26}, "or full_attention"),
    ("google/gemma-2-2b", {"layer_types": ["full_attention"]}, "the types of 1 layers"),
    ("google/gemma-2-2b", {"query_pre_attn_scalar": 0}, "above 0"),
    ("google/gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "has no soft cap of scores"),
    ("google/gemma-4-31B", {"enable_moe_block": True}, "no mixture of experts of Gemma 4"),
    ("google/gemma-4-31B", {"use_bidirectional_attention": "all"}, "computes causal attention"),
    ("google/gemma-4-31B", {"num_kv_shared_layers": 56}, "a layer of each type"),
    ("google/gemma-4-31B", {"layer_types": ["sliding_attention"] * 60}, "full_attention last"),
    ("google/gemma-4-31B", {"per_layer_config": {"5": {"k": 1}}}, "layer 5 in .* sets k=1"),
    ("google/gemma-4-31B", {"rope_parameters": None}, "expected the settings of sliding"),
    (MINISTRAL, {"text_config": {"model_type": "llama"}}, "ministral3 or mistral in text_config"),
    (MINISTRAL, {"text_config": {"model_type": "ministral3"}}, "lacks the key llama_4_scaling"),
    ("microsoft/Phi-4-mini-instruct", {"full_attn_mod": 2}, "expected 1"),
    ("microsoft/Phi-4-mini-instruct", {"partial_rotary_factor": 0.001}, "a part of 128"),
    ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layers": [0]}, "for each of 36 layers"),
    ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layers": [], "no_rope_layer_interval": -1}, "above 0"),
    ("HuggingFaceTB/SmolLM3-3B", {"layer_types": ["sliding_attention"] * 36}, "is not set"),
    ("ibm-granite/granite-3.3-2b-instruct", {"logits_scaling": 0}, "above 0"),
    ("CohereForAI/c4ai-command-r7b-12-2024", {"use_parallel_block": False}, "expected True"),
    ("CohereForAI/c4ai-command-r7b-12-2024", {"head_dim": 64}, "/ num_attention_heads"),
    ("bigcode/starcoder2-3b", {"norm_type": "rms_norm"}, "expected layer_norm"),
    ("stabilityai/stablelm-2-1_6b", {"qk_layernorm": True}, "stored head by head"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_what_a_family_does_not_compute_is_an_error(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(irc.Error, match=message):
        read(HUB[name] | changes)
