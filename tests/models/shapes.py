"""The six small Llamas that are compared with transformers, as keys of config.json."""

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def _llama(heads: int, kv_heads: int, tied: bool, rope: dict[str, Any], **more: Any) -> Any:
    return {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "rope_parameters": rope,
        # weights large enough for the logits to tell one token from another
        "initializer_range": 0.15,
        "attention_dropout": 0.0,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "mha": _llama(4, 4, False, DEFAULT),
    "mha_tied_odd": _llama(4, 4, True, DEFAULT, vocab_size=101, intermediate_size=83),
    "gqa_llama3": _llama(6, 2, False, LLAMA3, head_dim=16),
    "gqa_tied_bias": _llama(4, 2, True, DEFAULT, attention_bias=True, mlp_bias=True),
    "mqa_llama3_tied": _llama(4, 1, True, LLAMA3, head_dim=20, rms_norm_eps=1e-5),
    "mqa_odd": _llama(3, 1, False, DEFAULT, vocab_size=89, intermediate_size=77),
}
