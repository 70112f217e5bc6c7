"""Dense decoders of today: Gemma, Phi, OLMo, SmolLM3, Granite, GLM, Cohere and others."""

from __future__ import annotations

from . import SIZES, Case

FOUR = SIZES | {"num_hidden_layers": 4, "sliding_window": 6}  # of which the last is unlike others
GEMMA = FOUR | {"head_dim": 16, "query_pre_attn_scalar": 24}
GLOBAL = {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}
LOCAL = {"rope_type": "default", "rope_theta": 3000.0}
ROPES = {"full_attention": GLOBAL, "sliding_attention": LOCAL}
TYPES = ["sliding_attention", "full_attention"] * 2
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 2,  # so that every call is a long one
    "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.75,
}
GEMMA4 = FOUR | {  # local, full, and two layers with their caches
    "layer_types": TYPES,
    "head_dim": 12,
    "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}},
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 2.0,
}
ONE_KEY_HEAD = {"head_dim": 16, "num_key_value_heads": 1}
GEMMA4_31B = FOUR | {  # a full layer whose keys are its values, without inputs of layers
    "head_dim": 12,
    "attention_k_eq_v": True,
    "per_layer_config": {3: ONE_KEY_HEAD},
    "hidden_size_per_layer_input": 0,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28}
VISION |= {"num_attention_heads": 2, "patch_size": 14}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8}
HEADS = {"head_dim": 8, "num_key_value_heads": 2}
WIDE = SIZES | {"hidden_size": 64}  # heads of 16 features

DECODERS: dict[str, Case] = {
    "gemma2": Case("gemma2", GEMMA | {"attn_logit_softcapping": 3.0}),
    "gemma3": Case(
        "gemma3_text",
        GEMMA | {"final_logit_softcapping": 2.0, "rope_parameters": ROPES, "layer_types": TYPES},
    ),
    "gemma3_vision": Case(
        "gemma3",
        {"text_config": GEMMA, "vision_config": VISION},
        architecture="Gemma3ForConditionalGeneration",
    ),
    "gemma4": Case("gemma4_text", GEMMA4),
    "gemma4_dense": Case("gemma4_text", GEMMA4_31B),
    "gemma4_vision": Case(
        "gemma4",
        {"text_config": GEMMA4, "vision_config": VISION | HEADS | {"position_embedding_size": 8}},
        architecture="Gemma4ForConditionalGeneration",
    ),
    "phi": Case("phi", SIZES | {"qk_layernorm": True}),
    "phi3": Case("phi3", SIZES | {"sliding_window": 7}),
    "phi4": Case("phi3", WIDE | {"rope_parameters": LONG, "tie_word_embeddings": True}),
    "olmo": Case("olmo", SIZES | {"clip_qkv": 0.8}),
    "olmo2": Case("olmo2"),
    "olmo3": Case("olmo3", FOUR | {"rope_parameters": ROPES}),
    "smollm3": Case("smollm3", FOUR | {"use_sliding_window": True, "attention_bias": True}),
    "granite": Case(
        "granite",
        SIZES
        | {"attention_multiplier": 0.2, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.4, "logits_scaling": 5.0},
    ),
    "glm": Case("glm", SIZES | {"head_dim": 16}),
    "glm4": Case("glm4", SIZES | {"head_dim": 16, "attention_bias": False}),
    "cohere": Case("cohere", SIZES | {"use_qk_norm": True}),
    "cohere2": Case("cohere2", FOUR),
    "starcoder2": Case("starcoder2", SIZES | {"sliding_window": 7}),
    "stablelm": Case("stablelm", WIDE | {"use_qkv_bias": True}),
    "stablelm_parallel": Case("stablelm", WIDE | {"use_parallel_residual": True}),
    "ministral": Case("ministral", FOUR | {"head_dim": 16, "layer_types": TYPES}),
    "ministral3": Case("ministral3", SIZES | {"head_dim": 16, "rope_parameters": YARN}),
    "mistral3": Case(
        "mistral3",
        {
            "text_config": SIZES | {"model_type": "mistral", "sliding_window": 6},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        },
        architecture="Mistral3ForConditionalGeneration",
    ),
    "qwen2_windows": Case("qwen2", FOUR | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3_windows": Case(
        "qwen3", FOUR | {"head_dim": 16, "use_sliding_window": True, "layer_types": TYPES}
    ),
}
