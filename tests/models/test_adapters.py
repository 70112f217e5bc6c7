"""LoRA adapters in PEFT's format, merged at compile: the formula of Hu et al. (2021) in torch."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import huggingface
from irc.frontends.layers import Linear
from irc.weights import Slice, Transpose, UnboundRef
from irc.weights.checkpoint import Reader
from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.tiny_checkpoint import write_checkpoint

from .golden import write_safetensors
from .runners import Runner, relative
from .test_transformers import checkpoint, logits_of, oracle, tokens

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "somewhere/else",
    "bias": "none",
    "lora_dropout": 0.05,
    "r": 3,
    "lora_alpha": 7,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "init_lora_weights": True,
    "eva_config": None,
}
Q = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."


def write_adapter(folder: Path, tensors: dict[str, Any], **changes: Any) -> Path:
    """adapter_config.json and adapter_model.safetensors; names without PEFT's prefix."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    named = {PREFIX + name: np.ascontiguousarray(value) for name, value in tensors.items()}
    write_safetensors(folder / "adapter_model.safetensors", named)
    return folder


def factors(module: str, rows: int, columns: int, rank: int = 3) -> dict[str, np.ndarray]:
    """Random B [rows, rank] and A [rank, columns] under the names of a module."""
    draw = fresh(len(module) + rank).standard_normal
    sides = {"A": (rank, columns), "B": (rows, rank)}
    return {
        f"{module}.lora_{side}.weight": np.asarray(0.3 * draw(shape), np.float32)
        for side, shape in sides.items()
    }


# what adapter_config.json sets -> the rank and the factor of B A, by the end of a module's name
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, float]]]] = {
    "list": ("mha", {}, {"q_proj": (3, 7 / 3), "down_proj": (3, 7 / 3)}),
    "rslora": (
        "gqa_llama3",
        {"target_modules": "all-linear", "use_rslora": True, "r": 4},
        {"k_proj": (4, 7 / 2), "gate_proj": (4, 7 / 2)},
    ),
    "patterns": (
        "qwen2",
        {
            "target_modules": r".*\.(k|o|up)_proj",
            "rank_pattern": {"k_proj": 2},
            "alpha_pattern": {r"layers\.\d+\.self_attn\.o_proj": 9, "other": 1},
        },
        {"k_proj": (2, 7 / 2), "o_proj": (3, 3.0), "up_proj": (3, 7 / 3)},
    ),
    "experts": ("mixtral", {"target_modules": ["w2", "gate"]}, {"w2": (3, 7 / 3)}),
}


@pytest.mark.oracle
@pytest.mark.parametrize("case", SETTINGS)
def test_logits_are_those_of_merged_weights(case: str, tmp_path: Path) -> None:
    torch, transformers = oracle()
    from safetensors.torch import load_file, save_file

    name, changes, wanted = SETTINGS[case]
    folder, merged = tmp_path / "model", tmp_path / "merged"
    checkpoint(folder, name, save_original_format=True)
    copytree(folder, merged)
    state, tensors = load_file(folder / "model.safetensors"), dict[str, np.ndarray]()
    for key, weight in state.items():
        module = key.removesuffix(".weight")
        rank, scale = wanted.get(module.rpartition(".")[2], (0, 0.0))
        if rank:
            added = factors(module, weight.shape[0], weight.shape[1], rank)
            a, b = (torch.tensor(value) for value in added.values())
            weight += scale * b @ a
            tensors |= added
    save_file(state, merged / "model.safetensors", {"format": "pt"})
    ids, adapter = tokens(12), write_adapter(tmp_path / "adapter", tensors, **changes)
    logits = logits_of(transformers.AutoModelForCausalLM.from_pretrained(merged).eval(), ids)
    for mesh in ("tp=1", "tp=2", "tp=3"):
        built = irc.compile(folder, tmp_path / mesh, mesh=mesh, adapter=adapter)
        assert relative(Runner(built.program, 2).step(ids), logits) < 1e-4, mesh


def test_tensors_that_are_replaced_and_tables(tmp_path: Path) -> None:
    """modules_to_save and biases are tensors of their own; A of an embedding is [r, vocabulary]."""
    folder = write_checkpoint(tmp_path / "model", attention_bias=True)
    rows, bias = fresh().random((300, 32), dtype=np.float32), fresh(1).random(32, dtype=np.float32)
    table = {
        "model.embed_tokens.lora_embedding_A": fresh(2).random((3, 300), dtype=np.float32),
        "model.embed_tokens.lora_embedding_B": fresh(3).random((32, 3), dtype=np.float32),
    }
    saved = {"lm_head.weight": rows, f"{Q}.base_layer.bias": bias}
    adapter = write_adapter(
        tmp_path / "adapter",
        {**saved, **table},
        target_modules=["embed_tokens"],
        bias="all",
        modules_to_save=["lm_head"],
    )
    before = read_weights(huggingface.load(folder))
    after = read_weights(huggingface.load(folder, adapter=adapter))
    a, b = table.values()
    changed = {"lm_head.weight": rows, f"{Q}.bias": bias}
    changed["model.embed_tokens.weight"] = before["model.embed_tokens.weight"] + 7 / 3 * (b @ a).T
    for name, value in after.items():
        np.testing.assert_allclose(value, changed.get(name, before[name]), 1e-5, 1e-6)


def read_weights(module: irc.Module) -> dict[str, np.ndarray]:
    """Every weight of a module."""
    reader = Reader(module)
    return {name: reader.read(weight) for name, weight in module.weights.items()}


def test_tensors_of_other_names_and_layouts(tmp_path: Path) -> None:
    """A part of a merged tensor [in, out], in a checkpoint whose names lack a prefix."""
    stored = fresh().random((5, 12), dtype=np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"h.0.c_attn.weight": stored})
    added = factors("transformer.h.0.c_attn", 12, 5)
    adapter = write_adapter(tmp_path / "a", added, target_modules=["c_attn"], fan_in_fan_out=True)
    module = irc.trace(Linear(5, 4, bias=False), {"x": irc.Spec("f32", (1, 5))})
    part = UnboundRef("h.0.c_attn.weight", (5, 12)).then(Slice((None, (4, 8))))
    module.weights["weight"].ref = part.then(Transpose((1, 0)))
    huggingface.bind(module, tmp_path, adapter=adapter)
    a, b = added.values()
    expected = (stored.T + 7 / 3 * b @ a)[4:8]
    np.testing.assert_allclose(read_weights(module)["weight"], expected, 1e-5)


PAIR = factors(Q, 32, 32)
HEAD = {"lm_head.weight": np.zeros((300, 32), np.float32)}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "other method": ({"peft_type": "LOHA"}, PAIR, "irc merges LoRA only; .*merge_and_unload"),
    "dora": ({"use_dora": True}, PAIR, "sets use_dora=True: irc merges plain LoRA only"),
    "start": ({"init_lora_weights": "pissa"}, PAIR, "it changes weights of the model too"),
    "unread": ({"use_bdlora": {"a": 1}}, PAIR, "sets use_bdlora=.*, which irc does not support"),
    "bias": ({"bias": "some"}, PAIR, "expected none, all or lora_only"),
    "rank": ({"r": 5}, PAIR, f"has rank 3 in {Q}, but adapter_config.json sets 5"),
    "pattern": ({"alpha_pattern": {"(": 2}}, PAIR, "is no regular expression: missing"),
    "number": ({"alpha_pattern": {"q_proj": "2"}}, PAIR, "has '2' for q_proj; expected a number"),
    "infinite": ({"lora_alpha": float("inf")}, PAIR, "by inf; expected a finite number"),
    "target": ({"target_modules": ["up_proj"]}, PAIR, f"does not target {Q}"),
    "half": ({}, {f"{Q}.lora_A.weight": PAIR[f"{Q}.lora_A.weight"]}, "one factor of .* A and B"),
    "shape": ({}, factors(Q, 32, 48), r"adds \[32, 3\] @ \[3, 48\] to .*is \[32, 32\]"),
    "bias of B": ({}, PAIR | {f"{Q}.lora_B.bias": np.zeros(32, "f4")}, "which irc cannot merge"),
    "unknown": ({}, factors("model.layers.7.q_proj", 32, 32), "changes model.layers.7.*lacks"),
    "tied": ({"tied": True}, {"model.embed_tokens.weight": HEAD["lm_head.weight"]}, "both embed"),
    "tied head": ({"tied": True}, HEAD, "changes lm_head.weight, which the checkpoint .* lacks"),
    "quantized": ({"quantized": True}, PAIR, "which the checkpoint has quantized; compile"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_cannot_be_merged(case: str, tmp_path: Path) -> None:
    changes, tensors, message = REFUSED[case]
    model = write_checkpoint(tmp_path / "model", tie_word_embeddings=changes.get("tied", False))
    if changes.get("tied"):
        rewrite(model, drop="lm_head.weight")
    if changes.get("quantized"):
        quantize_rows(model, f"{Q}.weight")
    changes = {key: value for key, value in changes.items() if key not in ("tied", "quantized")}
    adapter = write_adapter(tmp_path / "adapter", tensors, **changes)
    with pytest.raises(irc.Error, match=message):
        huggingface.load(model, adapter=adapter)


def rewrite(folder: Path, drop: str, **added: np.ndarray) -> None:
    """Replace a tensor of a checkpoint folder by others."""
    path = folder / "model.safetensors"
    state = read_weights(huggingface.load(folder))
    write_safetensors(path, {**{k: v for k, v in state.items() if k != drop}, **added})


def quantize_rows(folder: Path, key: str) -> None:
    """Let a checkpoint have codes of i8 in place of a weight, as compressed-tensors stores them."""
    codes, scales = np.ones((32, 32), np.int8), np.ones((32, 1), np.float32)
    rewrite(folder, "", **{key: codes, f"{key}_scale": scales})
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True}}
    group["weights"] |= {"strategy": "channel"}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings | {"config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps(config))


def test_the_option_of_commands(tmp_path: Path) -> None:
    model, out = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    adapter = write_adapter(tmp_path / "adapter", PAIR)
    works("forecast", model, "--adapter", adapter)
    works("compile", model, "-o", out, "--adapter", adapter, "--mesh", "tp=2")
    assert 'low_rank_sum(@ckpt["' in (out / "module.irc").read_text()
    no_effect = "has no effect on"
    assert no_effect in refused("compile", out, "-o", tmp_path / "b", "--adapter", adapter)
    words = ("compile", model, "-o", tmp_path / "b", "--adapter", adapter)
    assert "random weights" in refused(*words, "--random-weights", "1")
    assert "no adapter_config.json" in refused(*words[:-1], model)
    message = refused("compile", adapter, "-o", tmp_path / "b")
    assert f"irc compile FOLDER --adapter {adapter}" in message and "somewhere/else" in message
