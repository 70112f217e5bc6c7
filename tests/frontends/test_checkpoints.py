"""Checkpoint folders: config.json, single files, shards, links; binding; errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import huggingface, random_weights
from irc.frontends.layers import LayerNorm
from irc.weights import UnboundRef

from ..models.golden import write_checkpoint, write_safetensors
from .test_trace import Net

SPEC = {"x": irc.Spec("f32", ("B", 4))}
SHAPES = {
    "first": (4,),
    "blocks.0.up.weight": (4, 4),
    "blocks.0.scale": (4,),
    "head.weight": (2, 4),
    "head.bias": (2,),
}


def tensors(**changes: Any) -> dict[str, np.ndarray]:
    found = {
        key: np.full(shape, i + 1, np.float32) for i, (key, shape) in enumerate(SHAPES.items())
    }
    found |= {key: value for key, value in changes.items() if value is not None}
    return {key: value for key, value in found.items() if changes.get(key, 0) is not None}


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    write_safetensors(path / "model.safetensors", tensors(**changes))
    return path


def net() -> irc.Module:
    return irc.trace(Net(1), SPEC)


def sharded(path: Path) -> Path:
    """The same tensors in two files with an index."""
    path.mkdir(exist_ok=True)
    every, where = tensors(), dict[str, str]()
    for i in range(2):
        name = f"model-{1 + i:05}-of-00002.safetensors"
        keys = list(every)[i::2]
        write_safetensors(path / name, {key: every[key] for key in keys})
        where |= dict.fromkeys(keys, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def refs(module: irc.Module) -> dict[str, str]:
    return {name: str(weight.ref) for name, weight in module.weights.items()}


def test_a_single_file(tmp_path: Path) -> None:
    module = huggingface.bind(net(), folder(tmp_path, first=np.full(4, 1, np.float16)))
    assert module.files == {"ckpt": f"{tmp_path}/model.safetensors"}
    assert refs(module)["head.bias"] == '@ckpt["head.bias"]'
    assert refs(module)["first"] == '@ckpt["first"].cast(f32)'
    hidden = np.maximum(np.full((4, 4), 2.0) @ np.full(4, 2.0), 0) * 3
    assert result(module).tolist() == [(np.full((2, 4), 4.0) @ hidden + 5).tolist()]


def result(module: irc.Module) -> np.ndarray:
    """f32 [1, 2] computed from ones."""
    return irc.evaluate(module, {"x": np.ones((1, 4), np.float32)})["result0"]


def test_shards_are_named_in_the_order_of_use(tmp_path: Path) -> None:
    module = huggingface.bind(net(), sharded(tmp_path))
    assert {name: Path(path).name for name, path in module.files.items()} == {
        "ckpt": "model-00001-of-00002.safetensors",
        "ckpt_1": "model-00002-of-00002.safetensors",
    }
    assert refs(module)["blocks.0.up.weight"] == '@ckpt_1["blocks.0.up.weight"]'
    whole = huggingface.bind(net(), folder(tmp_path / "whole"))
    assert result(module).tolist() == result(whole).tolist()
    assert str(irc.parse(str(module))) == str(module)


def test_links_of_a_hugging_face_cache(tmp_path: Path) -> None:
    real = sharded(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots"
    snapshot.mkdir()
    for i, path in enumerate(sorted(real.iterdir())):
        blob = path.rename(real / f"sha{i}")
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / blob.name)
    assert result(huggingface.bind(net(), snapshot)).shape == (1, 2)


def test_files_without_an_index(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").unlink()
    assert len(huggingface.bind(net(), tmp_path).files) == 2
    write_safetensors(tmp_path / "new.safetensors", {"first": tensors()["first"]})
    assert "00002.safetensors and new.safetensors both have 'first'" in complaint(tmp_path)


def test_only_unbound_weights_are_bound(tmp_path: Path) -> None:
    module = random_weights(net(), 1)
    before = refs(module)
    with pytest.raises(irc.Error, match="the model does not use them"):
        huggingface.bind(module, folder(tmp_path))
    huggingface.bind(module, tmp_path, ignore=["*"])
    assert refs(module) == before and not module.files


def complaint(path: Path, **options: Any) -> str:
    module = net()
    before = str(module)
    with pytest.raises(irc.Error) as caught:
        huggingface.bind(module, path, **options)
    assert str(module) == before, "a module that does not fit is left as it was"
    return str(caught.value)


def test_one_error_names_everything_that_does_not_fit(tmp_path: Path) -> None:
    wrong = {
        "head.weight": np.zeros((3, 4), np.float32),
        "blocks.0.up.weight": None,
        "blocks.0.down.weight": np.zeros((4, 4), np.float32),
        "blocks.0.scale": np.zeros(4, np.int32),
        "vision.weight": np.zeros(2, np.float32),
    }
    text = complaint(folder(tmp_path, **wrong))
    for message in (
        f"the checkpoint {tmp_path} does not fit the model @net",
        "blocks.0.up.weight; did you mean 'blocks.0.down.weight'?",
        "blocks.0.down.weight; did you mean 'blocks.0.up.weight'?",
        "\n    vision.weight\n",
        "head.weight is f32[3, 4], but the model takes f32[2, 4]",
        "blocks.0.scale is i32[4], which does not convert to f32",
    ):
        assert message in text


JOINED = """module @m {
  weight @w : f32[6, 4] = concat(unbound("a", [4, 4]), unbound("b", [2, 4]); 0)
  func @forward() -> (f32[6, 4]) {
    return @w
  }
}
"""


def test_concatenated_parameters_are_bound(tmp_path: Path) -> None:
    arrays = {"a": np.ones((4, 4), np.float32), "b": np.ones((2, 4), np.float16)}
    write_safetensors(tmp_path / "model.safetensors", arrays)
    module = huggingface.bind(irc.parse(JOINED), tmp_path)
    assert refs(module)["w"] == 'concat(@ckpt["a"], @ckpt["b"].cast(f32); 0)'
    write_safetensors(tmp_path / "model.safetensors", arrays | {"b": np.ones((3, 4), np.float32)})
    with pytest.raises(irc.Error, match=r"b is f32\[3, 4\], but the model takes f32\[2, 4\]"):
        huggingface.bind(irc.parse(JOINED), tmp_path)


def test_unused_tensors(tmp_path: Path) -> None:
    one = np.zeros(1, np.float32)
    path = folder(tmp_path, **{f"extra.{i}": one for i in range(30)})
    assert "... and 10 more" in complaint(path)
    path = folder(tmp_path, **{"vision.a": one, "model.rotary_emb.inv_freq": one})
    assert "vision.a" in complaint(path) and "inv_freq" not in complaint(path)
    huggingface.bind(net(), path, ignore=["vision.*"])


def test_alternatives(tmp_path: Path) -> None:
    other = {"first": UnboundRef("second")}
    path = folder(tmp_path, first=None, second=np.ones(4, np.float32))
    assert refs(huggingface.bind(net(), path, alternatives=other))["first"] == '@ckpt["second"]'
    both = folder(tmp_path, second=np.ones(4, np.float32))
    assert refs(huggingface.bind(net(), both, alternatives=other))["first"] == '@ckpt["first"]'


def zeros(module: irc.Module) -> dict[str, np.ndarray]:
    return {
        key: np.zeros(w.type.shape, np.float32)  # type: ignore[arg-type]
        for key, w in module.weights.items()
    }


@pytest.mark.parametrize("missing", ["", "lm_head.weight", "model.embed_tokens.weight"])
def test_tied_embeddings_are_found_under_either_name(tmp_path: Path, missing: str) -> None:
    path = write_checkpoint(tmp_path / "m", "mha_tied_odd")
    module = huggingface.load(path)
    assert "lm_head.weight" not in module.weights
    every = zeros(module) | {"lm_head.weight": np.zeros((101, 48), np.float32)}
    every.pop(missing, None)
    write_safetensors(path / "model.safetensors", every)
    key = "lm_head.weight" if missing.startswith("model") else "model.embed_tokens.weight"
    assert refs(huggingface.load(path))["model.embed_tokens.weight"] == f'@ckpt["{key}"]'


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_head_that_differs_from_tied_embeddings_is_used(tmp_path: Path, dtype: Any) -> None:
    path = write_checkpoint(tmp_path / "m", "mha_tied_odd")
    every = zeros(huggingface.load(path))
    head = np.zeros((101, 48), dtype)
    head[-1, -1] = 2
    write_safetensors(path / "model.safetensors", every | {"lm_head.weight": head})
    with pytest.warns(UserWarning, match=r"lm_head.weight.* have different values, so both are"):
        module = huggingface.load(path)
    assert '@ckpt["lm_head.weight"]' in refs(module)["lm_head.weight"]
    assert refs(module)["model.embed_tokens.weight"] == '@ckpt["model.embed_tokens.weight"]'


def test_one_weight_with_two_different_tensors_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, second=np.full(4, 2, np.float32))
    other = {"first": UnboundRef("second")}
    with pytest.raises(irc.Error, match=r"first and second with different values.* weight first"):
        huggingface.bind(net(), path, alternatives=other)


def test_untied_models_need_their_head(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", "mha")
    every = zeros(huggingface.load(path))
    del every["lm_head.weight"]
    write_safetensors(path / "model.safetensors", every)
    with pytest.raises(irc.Error, match=r"which are missing:\n +lm_head.weight"):
        huggingface.load(path)


def test_load_takes_dtype_and_ranges(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", "mqa_odd")
    module = huggingface.load(path, "bf16", {"B": (1, 2, 3)})
    assert module.dims == {"B": (1, 2, 3), "S": (1, 128, 256), "T": (1, 1, 256), "C": (1, 256, 256)}
    assert refs(module)["model.norm.weight"] == '@ckpt["model.norm.weight"].cast(bf16)'
    assert module.name == "llama" and str(module.main.returned[0].type) == "f32[B, T, 89]"
    with pytest.raises(irc.Error, match="f32, f16 or bf16, not i8"):
        huggingface.load(path, "i8")


def test_folders_without_readable_weights(tmp_path: Path) -> None:
    assert "there is no checkpoint folder" in complaint(tmp_path / "none")
    assert "has no weights: no model.safetensors" in complaint(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "irc does not read a.gguf: compile the checkpoint folder with" in complaint(tmp_path)
    with pytest.raises(irc.Error, match=r"has no config.json; irc does not read a.gguf"):
        huggingface.read_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    text = complaint(tmp_path)
    assert "only as pytorch_model.bin, a pickle, which runs code" in text
    assert "save_pretrained" in text
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    text = complaint(tmp_path)
    assert "model.safetensors" in text and "truncated" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../secret.safetensors", "'../secret.safetensors', which is outside its folder"),
        ("/etc/secret.safetensors", "which is outside its folder"),
        ("a/../../b.safetensors", "which is outside its folder"),
        ("..\\\\secret.safetensors", "which is outside its folder"),
        ("C:secret.safetensors", "which is outside its folder"),
        ("pytorch_model.bin", "which is not a safetensors file"),
        ("gone/lost.safetensors", "'gone/lost.safetensors', which does not exist"),
        (7, "7 is not a file name"),
    ],
)
def test_an_index_stays_in_its_folder(tmp_path: Path, name: Any, message: str) -> None:
    index = {"weight_map": {"first": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path.parent / "secret.safetensors").write_bytes(b"")
    assert message in complaint(tmp_path)


def test_a_wrong_index(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    index = path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    files = sorted(set(where.values()))
    swapped = {k: files[1] if v == files[0] else files[0] for k, v in where.items()}
    for text, message in (
        (json.dumps({"weight_map": swapped}), f"has 'first' in {files[1]}, but that file lacks it"),
        ("{", "is not JSON"),
        ("{}", "has no weight_map"),
    ):
        index.write_text(text)
        assert message in complaint(path)


def test_random_weights_are_made_only_on_request() -> None:
    module = net()
    with pytest.raises(irc.Error, match="has no values; compile the model with --checkpoint"):
        result(module)
    random_weights(module, 7)
    assert refs(module)["head.weight"] == 'random("head.weight", 7, 0.5)'
    assert refs(module)["head.bias"] == 'random("head.bias", 7, 0.02)'
    one, two, other = (result(random_weights(net(), seed)) for seed in (7, 7, 8))
    assert np.array_equal(one, two) and not np.array_equal(one, other)
    norm = random_weights(irc.trace(LayerNorm(4), SPEC), 2)
    assert refs(norm) == {"weight": 'random("weight", 2, 1.0)', "bias": 'random("bias", 2, 0.02)'}


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def config_of(model_type: str = "llama", **changes: Any) -> Any:
    config = LLAMA | {"model_type": model_type, "architectures": None} | changes
    return huggingface.model_of(config).config


def test_defaults_are_those_of_transformers() -> None:
    config = config_of()
    assert (config.kv_heads, config.head_size, config.max_position_embeddings) == (4, 12, 2048)
    assert (config.norm_eps, config.rope.theta, config.hidden_act) == (1e-6, 10000.0, "silu")
    assert not config.qkv_bias and not config.mlp_bias and not config.tie_word_embeddings
    mistral = config_of("mistral", num_attention_heads=8, sliding_window=9)
    assert (mistral.kv_heads, mistral.max_position_embeddings) == (8, 131072)
    assert mistral.sliding_window == 9
    qwen = config_of("qwen2", use_sliding_window=False, sliding_window=7)
    assert qwen.qkv_bias and not qwen.output_bias and qwen.sliding_window == 0
    mixtral = config_of("mixtral", num_attention_heads=8, router_jitter_noise=0.1)
    assert (mixtral.mixture.experts, mixtral.mixture.chosen, mixtral.kv_heads) == (8, 2, 8)
    assert (mixtral.norm_eps, mixtral.rope.theta, mixtral.sliding_window) == (1e-5, 1e6, 0)
    qwen3 = config_of("qwen3", num_attention_heads=32)
    assert (qwen3.kv_heads, qwen3.head_size, qwen3.qk_norm) == (32, 128, "head")


def test_sizes_are_read() -> None:
    config = config_of(
        num_key_value_heads=2, head_dim=10, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5
    )
    assert (config.kv_heads, config.head_size, config.norm_eps) == (2, 10, 1e-5)
    assert config.qkv_bias and config.output_bias and config.mlp_bias


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_rope_of_old_and_new_transformers() -> None:
    old = config_of(rope_scaling=LLAMA3, rope_theta=5000.0).rope
    new = config_of(rope_parameters=LLAMA3 | {"rope_theta": 5000.0}).rope
    assert old == new
    assert (old.kind, old.theta, old.factor, old.original_positions) == ("llama3", 5000.0, 8.0, 64)
    assert config_of(rope_scaling={"type": "linear", "factor": 2}).rope.factor == 2.0
    both = config_of(rope_parameters={"rope_type": "default", "rope_theta": 7.0}, rope_theta=9.0)
    assert both.rope.theta == 7.0
    assert config_of(rope_scaling=None, rope_theta=9.0).rope.theta == 9.0


def test_yarn_defaults() -> None:
    yarn = config_of(
        rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 512}
    ).rope
    assert (yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (4.0, 32.0, 1.0, True)
    factor = {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5, "truncate": False}
    yarn = config_of(rope_scaling=factor).rope
    assert (yarn.original_positions, yarn.attention_factor, yarn.truncate) == (2048, 1.5, False)


def test_dynamic_rope_has_the_length_of_the_model() -> None:
    rope = config_of(
        rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=99
    ).rope
    assert (rope.kind, rope.original_positions) == ("dynamic", 99)


def test_keys_without_an_effect_are_ignored() -> None:
    config_of(initializer_range=0.1, use_cache=True, eos_token_id=[1, 2], torch_dtype="bfloat16")
    config_of(sliding_window=None, use_something=False, pruned_heads={})
    huggingface.model_of(LLAMA | {"my_note": "x"}, ignore=["my_note"])


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "made_up"}, "'made_up'; irc models lists those that irc loads. Its nearest"),
    (
        {"model_type": "made_up", "a_factor": 2, "b_kind": "x", "dtype": "float32"},
        "which does not have a_factor, b_kind. Add the family in a Python file, as "
        "examples/custom_llm.py does, and give --load FILE; or export the model with torch",
    ),
    (
        {"model_type": "made_up", "hidden_size": None, "num_attention_heads": None},
        "irc models lists those that irc loads. Add the family",
    ),
    (
        {"model_type": "made_up", "text_config": {"a_factor": 3}},
        "which does not have a_factor. Add",
    ),
    ({"model_type": None, "architectures": None}, "no model_type and no architectures"),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "expected LlamaForCausalLM or LLaMAForCausalLM. Add the family",
    ),
    (
        {"model_type": None, "architectures": ["NoSuch"]},
        "sets architectures=['NoSuch']: irc models lists those that irc loads. Add the family",
    ),
    ({"residual_multiplier": 0.2}, "sets residual_multiplier=0.2, which irc does not support"),
    ({"quantization_config": {"quant_method": "quip"}}, "quant_method='quip'"),
    ({"sliding_window": 128}, "sets sliding_window=128"),
    ({"logit_scale": 0}, "sets logit_scale=0"),
    ({"a_factor": 2, "b_kind": "x"}, "sets a_factor=2, b_kind='x', which"),
    ({"hidden_size": None}, "config.json lacks the key hidden_size, which this model requires"),
    ({"hidden_size": "48"}, "hidden_size is '48'; expected a whole number"),
    ({"vocab_size": True}, "vocab_size is True; expected a whole number"),
    ({"mlp_bias": 1}, "mlp_bias is 1; expected true or false"),
    ({"num_attention_heads": 5}, "hidden_size 48 is not a multiple of num_attention_heads 5"),
    (
        {"model_type": "mixtral", "architectures": None}
        | {"num_key_value_heads": 4, "num_local_experts": 2, "num_experts_per_tok": 3},
        "num_experts_per_tok 3 lies outside 1 to num_local_experts 2",
    ),
    (
        {"num_key_value_heads": 3},
        "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
    ),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
    ({"rope_scaling": {"type": "lineer", "factor": 2}}, "'lineer'; did you mean 'linear'?"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2, "other_section": [1]}},
        "settings sets other_section=[1], which irc does not support in a rope of type linear",
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
    (QWEN2 | {"use_sliding_window": True}, "expected a sliding_window of at least 1"),
    (
        QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]},
        "use_sliding_window is not set",
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
