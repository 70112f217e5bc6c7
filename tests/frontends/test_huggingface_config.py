"""config.json: what is read, and which keys are errors."""

import json
from pathlib import Path
from typing import Any

import pytest

import irc
from irc.frontends import huggingface

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def sizes(model_type: str = "llama", **changes: Any) -> Any:
    config = LLAMA | {"model_type": model_type, "architectures": None} | changes
    return huggingface.model_of(config).config


def test_defaults_are_those_of_transformers() -> None:
    config = sizes()
    assert (config.kv_heads, config.head_size, config.max_position_embeddings) == (4, 12, 2048)
    assert (config.rms_norm_eps, config.rope.theta, config.hidden_act) == (1e-6, 10000.0, "silu")
    assert not config.qkv_bias and not config.mlp_bias and not config.tie_word_embeddings
    mistral = sizes("mistral", num_attention_heads=8, sliding_window=9)
    assert (mistral.kv_heads, mistral.max_position_embeddings) == (8, 131072)
    assert mistral.sliding_window == 9
    qwen = sizes("qwen2", use_sliding_window=False, sliding_window=7)
    assert qwen.qkv_bias and not qwen.output_bias and qwen.sliding_window == 0
    mixtral = sizes("mixtral", num_attention_heads=8, router_jitter_noise=0.1)
    assert (mixtral.num_local_experts, mixtral.num_experts_per_tok, mixtral.kv_heads) == (8, 2, 8)
    assert (mixtral.rms_norm_eps, mixtral.rope.theta, mixtral.sliding_window) == (1e-5, 1e6, 0)
    qwen3 = sizes("qwen3", num_attention_heads=32)
    assert (qwen3.kv_heads, qwen3.head_size, qwen3.qk_norm) == (32, 128, True)


def test_sizes_are_read() -> None:
    config = sizes(
        num_key_value_heads=2, head_dim=10, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5
    )
    assert (config.kv_heads, config.head_size, config.rms_norm_eps) == (2, 10, 1e-5)
    assert config.qkv_bias and config.output_bias and config.mlp_bias


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_rope_of_old_and_new_transformers() -> None:
    old = sizes(rope_scaling=LLAMA3, rope_theta=5000.0).rope
    new = sizes(rope_parameters=LLAMA3 | {"rope_theta": 5000.0}).rope
    assert old == new
    assert (old.kind, old.theta, old.factor, old.original_positions) == ("llama3", 5000.0, 8.0, 64)
    assert sizes(rope_scaling={"type": "linear", "factor": 2}).rope.factor == 2.0
    both = sizes(rope_parameters={"rope_type": "default", "rope_theta": 7.0}, rope_theta=9.0)
    assert both.rope.theta == 7.0
    assert sizes(rope_scaling=None, rope_theta=9.0).rope.theta == 9.0


def test_yarn_defaults() -> None:
    yarn = sizes(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 512}).rope
    assert (yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (4.0, 32.0, 1.0, True)
    factor = {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5, "truncate": False}
    yarn = sizes(rope_scaling=factor).rope
    assert (yarn.original_positions, yarn.attention_factor, yarn.truncate) == (2048, 1.5, False)


def test_dynamic_rope_has_the_length_of_the_model() -> None:
    rope = sizes(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=99).rope
    assert (rope.kind, rope.original_positions) == ("dynamic", 99)


def test_keys_without_an_effect_are_ignored() -> None:
    sizes(initializer_range=0.1, use_cache=True, eos_token_id=[1, 2], torch_dtype="bfloat16")
    sizes(sliding_window=None, use_something=False, pruned_heads={})
    huggingface.model_of(LLAMA | {"my_note": "x"}, ignore=["my_note"])


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "qwen3_moe"}, "'qwen3_moe'; it loads llama, mistral, mixtral, qwen2"),
    (
        {"model_type": "gpt2"},
        "does, and give --load FILE; or export the model with torch.onnx.export",
    ),
    ({"model_type": None, "architectures": None}, "no model_type and no architectures"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "expected one of LlamaForCausalLM"),
    ({"residual_multiplier": 0.2}, "sets residual_multiplier=0.2, which irc does not support"),
    ({"quantization_config": {"quant_method": "quip"}}, "quant_method='quip'"),
    ({"sliding_window": 128}, "sets sliding_window=128"),
    ({"logit_scale": 0}, "sets logit_scale=0"),
    ({"a_factor": 2, "b_kind": "x"}, "sets a_factor=2, b_kind='x', which"),
    ({"hidden_size": None}, "config.json lacks the key hidden_size, which this model requires"),
    ({"hidden_size": "48"}, "hidden_size is '48'; expected a whole number"),
    ({"vocab_size": True}, "vocab_size is True; expected a whole number"),
    ({"mlp_bias": 1}, "mlp_bias is 1; expected true or false"),
    ({"num_attention_heads": 5}, "hidden_size 48 is no multiple of num_attention_heads 5"),
    (
        {"model_type": "mixtral", "architectures": None}
        | {"num_key_value_heads": 4, "num_local_experts": 2, "num_experts_per_tok": 3},
        "num_experts_per_tok 3 lies outside 1 to num_local_experts 2",
    ),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
    ({"rope_scaling": {"type": "lineer", "factor": 2}}, "'lineer'; did you mean 'linear'?"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}},
        "settings sets mrope_section=[1], which irc does not support in a rope of type linear",
    ),
    ({"rope_scaling": {"type": "linear"}}, "the rope settings lacks the key factor"),
    (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
        "original_max_position_embeddings is 0; it must be at least 1",
    ),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0; it must be at least 1"),
    ({"architectures": [3]}, "architectures is [3]; expected a list of strings"),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": ["x"]}},
        "short_factor is ['x']; expected a list of numbers",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor has no meaning"),
    (QWEN2 | {"use_sliding_window": True}, "irc supports no window in some layers only"),
    (
        QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]},
        "irc supports full_attention only",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_not_supported_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(irc.Error) as caught:
        huggingface.model_of(LLAMA | changes)
    assert message in caught.value.message


def test_dtypes() -> None:
    assert huggingface.checkpoint_dtype({"torch_dtype": "bfloat16"}) == "bf16"
    assert huggingface.checkpoint_dtype({"dtype": "torch.float16"}) == "f16"
    assert huggingface.checkpoint_dtype({}) == "f32"
    with pytest.raises(irc.Error, match="in no dtype 'int8'"):
        huggingface.checkpoint_dtype({"dtype": "int8"})


def test_config_files(tmp_path: Path) -> None:
    with pytest.raises(irc.Error, match=r"has no config\.json$"):
        huggingface.read_config(tmp_path)
    with pytest.raises(irc.Error, match="there is no such folder"):
        huggingface.read_config(tmp_path / "none")
    path = tmp_path / "config.json"
    for data, message in (
        (b"{'a': 1}", "is not JSON"),
        (b"[1]", "holds no JSON object"),
        (b"\xff\xfe", "is not JSON"),
    ):
        path.write_bytes(data)
        with pytest.raises(irc.Error, match=message):
            huggingface.read_config(tmp_path)
    path.write_text(json.dumps(LLAMA))
    assert huggingface.read_config(tmp_path) == LLAMA
