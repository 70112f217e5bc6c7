"""config.json: what is read, and that no key with a meaning is passed over."""

import json
from pathlib import Path
from typing import Any

import pytest

import irc
from irc.frontends import huggingface
from irc.frontends.models import MixtralConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def sizes(**changes: Any) -> Any:
    return huggingface.model_of(LLAMA | changes).config


def test_defaults_are_those_of_transformers() -> None:
    config = sizes()
    assert (config.kv_heads, config.head_size, config.max_position_embeddings) == (4, 12, 2048)
    assert (config.rms_norm_eps, config.rope.theta, config.hidden_act) == (1e-6, 10000.0, "silu")
    assert not config.qkv_bias and not config.mlp_bias and not config.tie_word_embeddings
    mistral = huggingface.model_of(
        LLAMA | {"model_type": "mistral", "num_attention_heads": 8, "sliding_window": 9}
    ).config
    assert (mistral.kv_heads, mistral.max_position_embeddings, mistral.sliding_window) == (
        8,
        131072,
        9,
    )
    qwen = huggingface.model_of(
        LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 7}
    ).config
    assert qwen.qkv_bias and not qwen.output_bias and qwen.sliding_window == 0


def test_mixtral() -> None:
    wanted = {"model_type": "mixtral", "num_attention_heads": 8, "router_jitter_noise": 0.1}
    config = huggingface.model_of(LLAMA | wanted).config
    assert isinstance(config, MixtralConfig)
    assert (config.num_local_experts, config.num_experts_per_tok, config.kv_heads) == (8, 2, 8)
    assert (config.rms_norm_eps, config.rope.theta, config.sliding_window) == (1e-5, 1e6, 0)


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


def test_dynamic_stretches_from_the_own_length() -> None:
    rope = sizes(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=99).rope
    assert (rope.kind, rope.original_positions) == ("dynamic", 99)


def test_keys_without_a_meaning_are_passed_over() -> None:
    sizes(initializer_range=0.1, use_cache=True, eos_token_id=[1, 2], torch_dtype="bfloat16")
    sizes(sliding_window=None, use_something=False, pruned_heads={})
    huggingface.model_of(LLAMA | {"my_note": "x"}, ignore=["my_note"])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": (
        {"model_type": "lama"},
        "no model of model_type 'lama'; did you mean 'llama'?; it loads llama, mistral, mixtral",
    ),
    "no type": ({"model_type": None}, "names no model_type; irc loads llama"),
    "head": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "the architecture is LlamaForSequenceClassification",
    ),
    "unknown key": (
        {"residual_multiplier": 0.2},
        "sets residual_multiplier=0.2, which irc does not support in model_type llama",
    ),
    "quantized": (
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "quantization_config={quant_method, bits}",
    ),
    "window of a llama": ({"sliding_window": 128}, "sets sliding_window=128"),
    "zero is a value": ({"logit_scale": 0}, "sets logit_scale=0"),
    "two keys": ({"a_factor": 2, "b_kind": "x"}, "sets a_factor=2, b_kind='x', which"),
    "missing": ({"hidden_size": None}, "does not say hidden_size, which this model needs"),
    "wrong kind": ({"hidden_size": "48"}, "hidden_size is a whole number, not '48'"),
    "bool is no int": ({"vocab_size": True}, "vocab_size is a whole number, not True"),
    "flag": ({"mlp_bias": 1}, "mlp_bias is true or false, not 1"),
    "heads": ({"num_attention_heads": 5}, "hidden_size 48 is no multiple of num_attention_heads 5"),
    "groups": (
        {"num_key_value_heads": 3},
        "num_attention_heads 4 is no multiple of num_key_value_heads 3",
    ),
    "no heads": ({"num_key_value_heads": 0}, "at least one attention head"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
    "rope type": (
        {"rope_scaling": {"type": "lineer", "factor": 2}},
        "no rope of type 'lineer' in irc; did you mean 'linear'?",
    ),
    "rope key": (
        {"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}},
        "settings sets mrope_section=[1], which irc does not support in a rope of type linear",
    ),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, "the rope settings does not say factor"),
    "rope of no length": (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
        "original_max_position_embeddings is 0; it must be at least 1",
    ),
    "no positions": (
        {"max_position_embeddings": 0},
        "max_position_embeddings is 0; it must be at least 1",
    ),
    "no words": ({"architectures": [3]}, "architectures is a list of strings, not [3]"),
    "no numbers": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": ["x"]}},
        "short_factor is a list of numbers, not ['x']",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor has no meaning"),
    "layers with windows": (
        {"model_type": "qwen2", "use_sliding_window": True},
        "does not support qwen2 with a sliding window",
    ),
    "layer types": (
        {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
        "does not support qwen2 with a sliding window",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_supported_is_an_error(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(irc.Error) as caught:
        huggingface.model_of(LLAMA | changes)
    assert message in str(caught.value)


def test_dtypes() -> None:
    assert huggingface.checkpoint_dtype({"torch_dtype": "bfloat16"}) == "bf16"
    assert huggingface.checkpoint_dtype({"dtype": "torch.float16"}) == "f16"
    assert huggingface.checkpoint_dtype({}) == "f32"
    with pytest.raises(irc.Error, match="no dtype 'int8'"):
        huggingface.checkpoint_dtype({"dtype": "int8"})


def test_config_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(irc.Error, match=r"has no config\.json$"):
        huggingface.read_config(tmp_path)
    with pytest.raises(irc.Error, match="there is no such folder"):
        huggingface.read_config(tmp_path / "none")
    path.write_text("{'a': 1}")
    with pytest.raises(irc.Error, match="is not JSON"):
        huggingface.read_config(tmp_path)
    path.write_text("[1]")
    with pytest.raises(irc.Error, match="holds no JSON object"):
        huggingface.read_config(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(irc.Error, match="is not JSON"):
        huggingface.read_config(tmp_path)
    path.write_text(json.dumps(LLAMA))
    assert huggingface.read_config(tmp_path) == LLAMA
