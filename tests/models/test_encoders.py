"""Encoders and vision towers against transformers, sentence embeddings against their definition."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.frontends import huggingface

from .cases import Case, cases, to_build
from .golden import write_safetensors
from .runners import relative
from .test_transformers import oracle

pytestmark = pytest.mark.oracle
ENCODERS: dict[str, Case] = cases("ENCODERS")
MESHES = [(name, mesh) for name, case in ENCODERS.items() for mesh in case.meshes]
BUILT = [name for name, case in ENCODERS.items() if "tp=3" in case.meshes]
BUILT.remove("xlm-roberta/ForMaskedLM")  # RoBERTa's program
LENGTHS, TOKENS, PADDING, EOS = np.array([9, 6, 4]), 9, 1, 7
MASK = (np.arange(TOKENS) < LENGTHS[:, None]).astype(np.int32)
Arrays = Mapping[str, np.ndarray]


def inputs_of(model: Any) -> dict[str, np.ndarray]:
    """Rows of different lengths, padded on the right, whose last token is EOS; and images."""
    rng, config = np.random.default_rng(1), model.config
    ids = rng.integers(8, 61, MASK.shape)
    ids[np.arange(len(ids)), LENGTHS - 1] = EOS
    inputs: dict[str, np.ndarray] = {}
    if hasattr(config, "vocab_size") or hasattr(config, "text_config"):
        inputs["input_ids"] = np.where(MASK, ids, PADDING).astype(np.int32)
        inputs["attention_mask"] = MASK
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = (rng.integers(0, 2, MASK.shape) * MASK).astype(np.int32)
    if hasattr(config, "patch_size") or hasattr(config, "vision_config"):
        inputs["pixel_values"] = rng.standard_normal((2, 3, 12, 12)).astype(np.float32)
    return inputs


def results_of(model: Any, inputs: Arrays) -> dict[str, np.ndarray]:
    """What transformers computes."""
    torch, _ = oracle()
    long = {name: x.astype(np.int64) if x.dtype == np.int32 else x for name, x in inputs.items()}
    with torch.no_grad():
        results = model(**{name: torch.tensor(x) for name, x in long.items()})
    return {name: x.numpy() for name, x in results.items() if torch.is_tensor(x)}


def agree(got: Arrays, wanted: Arrays, limit: float) -> None:
    """The same results; those of padding mean nothing."""
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        valid = MASK > 0 if want.shape[:2] == MASK.shape else ...
        assert relative(got[name][valid], want[valid]) < limit, name


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    case = ENCODERS[name]
    model = case.save(tmp_path / "model")
    inputs = inputs_of(model)
    wanted = results_of(model, inputs)
    agree(irc.evaluate(huggingface.load(tmp_path / "model"), inputs), wanted, case.limit)
    built = irc.compile(tmp_path / "model", tmp_path / "built")
    agree(built.run(inputs), wanted, case.limit)


@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_an_encoder_on_several_ranks(name: str, mesh: str, tmp_path: Path) -> None:
    case = ENCODERS[name]
    model = case.save(tmp_path / "model")
    built = irc.compile(tmp_path / "model", tmp_path / "built", backend="reference", mesh=mesh)
    inputs = inputs_of(model)
    agree(built.run(inputs), results_of(model, inputs), case.limit)


@pytest.mark.parametrize("name", BUILT)
def test_every_operation_of_an_encoder_has_a_kernel(name: str, tmp_path: Path) -> None:
    ENCODERS[name].save(tmp_path / "model", "bfloat16")
    irc.compile(tmp_path / "model", tmp_path / "built", backend="cuda")


@pytest.mark.needs_rtx
@pytest.mark.parametrize("name", to_build(BUILT, 3, 15))
def test_tensorrt_builds_an_encoder(name: str, tmp_path: Path) -> None:
    ENCODERS[name].save(tmp_path / "model", "bfloat16")
    irc.compile(tmp_path / "model", tmp_path / "built", backend="tensorrt-rtx")


def test_only_tokens_have_to_be_given(tmp_path: Path) -> None:
    model = ENCODERS["bert/ForSequenceClassification"].save(tmp_path / "model")
    built, ids = irc.compile(tmp_path / "model", tmp_path / "built"), [[5, 60, 7], [9, 8, 1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = built.run({"input_ids": ids})
    agree(got, results_of(model, {"input_ids": np.array(ids)}), 1e-4)


def test_images_have_the_size_of_the_model(tmp_path: Path) -> None:
    ENCODERS["ViTModel"].save(tmp_path / "model")
    built = irc.compile(tmp_path / "model", tmp_path / "built")
    with pytest.raises(Error, match=r"shape \[1, 3, 16, 16\], but it must be f32\[B, 3, 12, 12\]"):
        built.run({"pixel_values": np.zeros((1, 3, 16, 16), np.float32)})


def test_checkpoints_from_tensorflow(tmp_path: Path) -> None:
    """bert-base-uncased has gamma and beta, a pooler and scores of the next sentence."""
    case = replace(ENCODERS["bert/ForMaskedLM"], architecture="BertForPreTraining")
    model = case.save(tmp_path)
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    stored = {name: x.numpy() for name, x in model.state_dict().items()}
    for new, old in names.items():
        stored = {name.replace(new, old): x for name, x in stored.items()}
    write_safetensors(tmp_path / "model.safetensors", stored)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["BertForMaskedLM"]})
    )
    inputs = inputs_of(model)
    wanted = {"logits": results_of(model, inputs)["prediction_logits"]}
    agree(irc.evaluate(huggingface.load(tmp_path), inputs), wanted, 1e-4)


# sentence-transformers' Pooling, row by row: modes of pooling_mode -> a vector of states [S, H]
POOLED: dict[str, Any] = {
    "cls": lambda x: x[0],
    "max": lambda x: x.max(0).values,
    "mean": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean": lambda x: sum(x[i] * (i + 1) for i in range(len(x))) / sum(range(len(x) + 1)),
    "lasttoken": lambda x: x[-1],
}


def write_modules(folder: Path, pooling: Any, *behind: tuple[str, Any]) -> None:
    """modules.json with a Transformer, a Pooling and what is behind it."""
    modules = [("Transformer", None), ("Pooling", pooling), *behind]
    entries: list[dict[str, Any]] = []
    for index, (kind, config) in enumerate(modules):
        path = "" if kind == "Transformer" else f"{index}_{kind}"
        entries.append({"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"})
        if config is not None:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(entries))


def sentences(model: Any, inputs: Arrays, modes: list[str]) -> Any:
    """Pooled states of the tokens of each row, mode after mode."""
    torch, _ = oracle()
    states = torch.tensor(results_of(model, inputs)["last_hidden_state"])
    rows = [x[:length] for x, length in zip(states, LENGTHS, strict=True)]
    return torch.stack([torch.cat([POOLED[mode](x) for mode in modes]) for x in rows])


@pytest.mark.parametrize("name", ["bert/Model", "mpnet/Model", "modernbert/Model"])
def test_sentence_embeddings(name: str, tmp_path: Path) -> None:
    model = ENCODERS[name].save(tmp_path)
    inputs, modes = inputs_of(model), [*POOLED][::-1]
    for config, chosen in (
        ({"embedding_dimension": 36, "pooling_mode": modes}, modes),
        ({"embedding_dimension": 36, "pooling_mode": "weightedmean"}, ["weightedmean"]),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ["cls", "mean"]),
        ({"word_embedding_dimension": 36, "include_prompt": True}, ["mean"]),
    ):
        write_modules(tmp_path, config)
        got = irc.evaluate(huggingface.load(tmp_path), inputs)
        agree(got, {"sentence_embedding": sentences(model, inputs, chosen).numpy()}, 1e-4)


DENSE = {"in_features": 36, "out_features": 20, "bias": True}
DENSE["activation_function"] = "torch.nn.modules.activation.Tanh"


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2"])
def test_modules_behind_the_pooling(mesh: str, tmp_path: Path) -> None:
    torch, _ = oracle()
    folder = tmp_path / "model"
    model = ENCODERS["roberta/Model"].save(folder)
    write_modules(folder, {}, ("Dropout", {}), ("Dense", DENSE), ("Normalize", None))
    dense = torch.nn.Linear(36, 20)
    stored = {f"linear.{name}": x.detach().numpy() for name, x in dense.named_parameters()}
    write_safetensors(folder / "3_Dense" / "model.safetensors", stored)
    inputs = inputs_of(model)
    with torch.no_grad():
        wanted = torch.tanh(dense(sentences(model, inputs, ["mean"])))
    wanted = torch.nn.functional.normalize(wanted).numpy()
    built = irc.compile(folder, tmp_path / "built", mesh=mesh)
    agree(built.run(inputs), {"sentence_embedding": wanted}, 1e-4)
    write_modules(folder, {}, ("Dropout", {}), ("Dense", DENSE | {"out_features": 21}))
    with pytest.raises(
        Error, match=r"3_Dense: linear.weight is \[20, 36\]; expected f32\[21, 36\]"
    ):
        huggingface.load(folder)


BERT = {"model_type": "bert", "vocab_size": 60}
FIRST = {"type": "x.Transformer", "path": ""}
MISH = DENSE | {"activation_function": "torch.nn.modules.activation.Mish"}
# config.json, modules.json or the arguments of write_modules, the message
REFUSED: list[tuple[Any, Any, str]] = [
    ({"model_type": "llama"}, ({},), "sentence embeddings of model_type 'llama'; irc makes them"),
    (BERT, ({"include_prompt": False},), "include_prompt=False: irc has no prompts"),
    (BERT, ({"pooling_mode": "median"},), "pooling_mode=.*expected some of cls, max, mean"),
    (BERT, ({"pooling_mode_new": True},), "pooling_mode_new=True, which irc does not support"),
    (BERT, ({}, ("LSTM", {})), "irc has no LSTM, only Normalize, Dense and Dropout"),
    (BERT, ({}, ("Dense", MISH)), "irc has Identity, Tanh"),
    (BERT, ({}, ("Dense", {})), "lacks the key in_features"),
    (BERT, [FIRST | {"path": "0_Transformer"}], "whose path is empty, then a Pool"),
    (BERT, [FIRST, {"path": "."}], "expected a type, and a path"),
    (BERT, [FIRST | {"path": "../other"}], "a path below its folder, found"),
    (BERT, {}, "modules.json holds no JSON list"),
]


@pytest.mark.parametrize(("config", "modules", "message"), REFUSED)
def test_modules_that_irc_lacks(config: Any, modules: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    if isinstance(modules, tuple):
        write_modules(tmp_path, *modules)
    with pytest.raises(Error, match=message):
        huggingface.read_config(tmp_path)


def nested(**keys: Any) -> dict[str, Any]:
    """An object of an old config.json, with the keys that every object of transformers had."""
    old = {"add_cross_attention": False, "bad_words_ids": None, "dropout": 0.0, "do_sample": False}
    old |= {"chunk_size_feed_forward": 0, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "top_k": 50}
    return old | {"tie_word_embeddings": True, "pruned_heads": {}, "initializer_factor": 1.0} | keys


BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
BASE |= {"num_attention_heads": 12, "hidden_dropout_prob": 0.1, "gradient_checkpointing": False}
MODERN = {"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22}
MODERN |= {"num_attention_heads": 12, "vocab_size": 50368, "global_attn_every_n_layers": 3}
MODERN |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "layer_norm_eps": 1e-05}
MODERN |= {"norm_eps": 1e-05, "position_embedding_type": "absolute", "mlp_dropout": 0.0}
MODERN |= {"classifier_pooling": "mean", "sparse_pred_ignore_index": -100, "local_attention": 128}
CLIP_L = {"hidden_size": 768, "projection_dim": 768, "eos_token_id": 2, "vocab_size": 49408}
CLIP_L |= {"intermediate_size": 3072, "num_attention_heads": 12}
VIT_L = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14}
MBERT = "google-bert/bert-base-multilingual-cased"
HUB: dict[str, tuple[str, dict[str, Any]]] = {
    MBERT: (
        "BertForMaskedLM",
        {"model_type": "bert", "directionality": "bidi", "pooler_fc_size": 768, **BASE}
        | {"vocab_size": 119547, "max_position_embeddings": 512, "type_vocab_size": 2},
    ),
    "answerdotai/ModernBERT-base": (
        "ModernBertForMaskedLM",
        {"model_type": "modernbert", "max_position_embeddings": 8192, **MODERN},
    ),
    "openai/clip-vit-large-patch14": (
        "CLIPModel",
        {"model_type": "clip", "projection_dim": 768, "logit_scale_init_value": 2.6592}
        | {"text_config": nested(**CLIP_L), "text_config_dict": CLIP_L}
        | {"vision_config": nested(**VIT_L, num_attention_heads=16), "vision_config_dict": None},
    ),
    "google/siglip-base-patch16-224": (
        "SiglipModel",
        {"model_type": "siglip", "initializer_factor": 1.0}
        | {"text_config": {"model_type": "siglip_text_model", "vocab_size": 32000}}
        | {"vision_config": {"model_type": "siglip_vision_model"}},
    ),
    "google/vit-base-patch16-224": (
        "ViTForImageClassification",
        {"model_type": "vit", "image_size": 224, "patch_size": 16, "encoder_stride": 16, **BASE}
        | {"id2label": {str(i): f"class {i}" for i in range(1000)}},
    ),
}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("google/vit-base-patch16-224", {"patch_size": 0}, "expected 1 to image_size 224"),
    ("google/vit-base-patch16-224", {"image_size": [224, 224]}, "expected a whole number"),
    ("google/vit-base-patch16-224", {"num_attention_heads": 7}, "is not a multiple of num_att"),
    ("answerdotai/ModernBERT-base", {"local_attention": 1}, "expected at least 2"),
    ("answerdotai/ModernBERT-base", {"global_attn_every_n_layers": 0}, "1 of 0 layers global"),
    ("answerdotai/ModernBERT-base", {"classifier_pooling": "max"}, "expected cls or mean"),
    ("answerdotai/ModernBERT-base", {"layer_types": ["full_attention"]}, "types of 1 layers"),
    (MBERT, {"is_decoder": True}, "is_decoder=True, which irc does not"),
    (MBERT, {"position_embedding_type": "relative_key"}, "absolute positions"),
    (MBERT, {"architectures": ["SentenceTransformer"]}, "with a modules.json"),
    ("openai/clip-vit-large-patch14", {"text_config": {"depth": 3}}, "text_config sets depth=3"),
    ("google/siglip-base-patch16-224", {"vision_config": {}}, "expected the sizes of an encoder"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_what_encoders_lack_is_an_error(name: str, changes: Any, message: str) -> None:
    architecture, values = HUB[name]
    with pytest.raises(Error, match=message):
        huggingface.model_of({"architectures": [architecture]} | values | changes)


@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub_mean_what_transformers_says(name: str) -> None:
    """Old and new keys mean the same, and there are as many weights."""
    torch, transformers = oracle()
    architecture, values = HUB[name]
    keys = {key: value for key, value in deepcopy(values).items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(values["model_type"], **keys)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    old = huggingface.model_of(values | {"architectures": [architecture]})
    new = json.loads(config.to_json_string()) | {"architectures": [architecture]}
    assert old.config == huggingface.model_of(new).config
    shapes = [weight.type.shape for weight in old.trace("f32").weights.values()]
    assert sum(map(math.prod, shapes)) == sum(x.numel() for x in model.parameters())
