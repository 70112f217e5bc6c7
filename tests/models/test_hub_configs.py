"""The config.json of models as they are on the Hub, whose keys are older than transformers 5."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest

import irc
from irc.frontends.models import find_family

pytestmark = pytest.mark.oracle
# keys that nearly every file has
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0",
    "use_cache": True,
}


def config(architecture: str, model_type: str, sizes: str, context: int, **keys: Any) -> Any:
    """A config.json; `sizes` are those of vocabulary, hidden, intermediate, layers and heads."""
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads"
    )
    numbers = dict(zip(names.split(), map(int, sizes.split()), strict=True))
    kind = {"architectures": [architecture], "model_type": model_type}
    return COMMON | kind | numbers | {"max_position_embeddings": context} | keys


GEMMA = {
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 24 + [40.0] * 24}
NO_ROPE = [1, 1, 1, 0] * 9

HUB: dict[str, Any] = {
    "google/gemma-2-2b": config(
        *("Gemma2ForCausalLM", "gemma2", "256000 2304 9216 26 8 4", 8192),
        **GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        rms_norm_eps=1e-06,
        sliding_window=4096,
    ),
    "google/gemma-3-1b-it": config(
        *("Gemma3ForCausalLM", "gemma3_text", "262144 1152 6912 26 4 1", 32768),
        **GEMMA,
        rope_local_base_freq=10000,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "google/gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "mm_tokens_per_image": 256,
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
    "microsoft/phi-2": config(
        *("PhiForCausalLM", "phi", "51200 2560 10240 32 32 32", 2048),
        embd_pdrop=0.0,
        hidden_act="gelu_new",
        layer_norm_eps=1e-05,
        partial_rotary_factor=0.4,
        qk_layernorm=False,
        resid_pdrop=0.1,
    ),
    "microsoft/Phi-3-mini-4k-instruct": config(
        *("Phi3ForCausalLM", "phi3", "32064 3072 8192 32 32 32", 4096),
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        embd_pdrop=0.0,
        original_max_position_embeddings=4096,
        resid_pdrop=0.0,
        sliding_window=2047,
    ),
    "microsoft/Phi-4-mini-instruct": config(
        *("Phi3ForCausalLM", "phi3", "200064 3072 8192 32 24 8", 131072),
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        mlp_bias=False,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        rope_scaling=LONG,
        sliding_window=262144,
        tie_word_embeddings=True,
    ),
    "allenai/OLMo-1B-hf": config(
        *("OlmoForCausalLM", "olmo", "50304 2048 8192 16 16 16", 2048), clip_qkv=None
    ),
    "allenai/OLMo-2-1124-7B": config(
        *("Olmo2ForCausalLM", "olmo2", "100352 4096 11008 32 32 32", 4096), rope_theta=500000
    ),
    "allenai/Olmo-3-7B-Instruct": config(
        *("Olmo3ForCausalLM", "olmo3", "100278 4096 11008 32 32 32", 65536),
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        rope_scaling={
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        rope_theta=500000,
        sliding_window=4096,
    ),
    "HuggingFaceTB/SmolLM3-3B": config(
        *("SmolLM3ForCausalLM", "smollm3", "128256 2048 11008 36 16 4", 65536),
        layer_types=["full_attention"] * 36,
        max_window_layers=28,
        mlp_bias=False,
        no_rope_layer_interval=4,
        no_rope_layers=NO_ROPE,
        pretraining_tp=2,
        rope_theta=5000000.0,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "ibm-granite/granite-3.3-2b-instruct": config(
        *("GraniteForCausalLM", "granite", "49159 2048 8192 40 32 8", 131072),
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        mlp_bias=False,
        residual_multiplier=0.22,
        rope_theta=10000000.0,
        tie_word_embeddings=True,
    ),
    "THUDM/GLM-4-9B-0414": config(
        *("Glm4ForCausalLM", "glm4", "151552 4096 13696 40 32 2", 32768),
        head_dim=128,
        pad_token_id=151329,
        partial_rotary_factor=0.5,
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": config(
        *("Cohere2ForCausalLM", "cohere2", "256000 4096 14336 32 32 8", 8192),
        cache_implementation="hybrid",
        head_dim=128,
        layer_norm_eps=1e-05,
        layer_switch=4,
        logit_scale=0.25,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rope_theta=50000,
        rotary_pct=1.0,
        sliding_window=4096,
        sliding_window_pattern=4,
        use_embedding_sharing=True,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=True,
    ),
    "bigcode/starcoder2-3b": config(
        *("Starcoder2ForCausalLM", "starcoder2", "49152 3072 12288 30 24 2", 16384),
        embedding_dropout=0.1,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_epsilon=1e-05,
        mlp_type="default",
        norm_epsilon=1e-05,
        norm_type="layer_norm",
        residual_dropout=0.1,
        rope_theta=999999.4420358813,
        sliding_window=4096,
        use_bias=True,
    ),
    "stabilityai/stablelm-2-1_6b": config(
        *("StableLmForCausalLM", "stablelm", "100352 2048 5632 24 32 32", 4096),
        layer_norm_eps=1e-05,
        partial_rotary_factor=0.25,
        use_qkv_bias=True,
    ),
}


def read(values: dict[str, Any]) -> Any:
    """The sizes that irc reads."""
    return find_family(values).read_config(values)


@pytest.mark.parametrize("name", HUB)
def test_old_and_new_keys_mean_the_same(name: str) -> None:
    values = HUB[name]
    copy = deepcopy(values)  # transformers writes into the objects that it gets
    new = import_module("transformers").AutoConfig.for_model(copy.pop("model_type"), **copy)
    assert read(new.to_dict()) == read(values)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("google/gemma-2-2b", {"use_bidirectional_attention": True}, "computes causal attention"),
    ("google/gemma-2-2b", {"layer_types": ["local"] * 26}, "or full_attention"),
    ("google/gemma-2-2b", {"layer_types": ["full_attention"]}, "the types of 1 layers"),
    ("google/gemma-2-2b", {"query_pre_attn_scalar": 0}, "above 0"),
    ("google/gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "has no soft cap of scores"),
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
