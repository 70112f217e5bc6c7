"""TensorRT-LLM checkpoint folders: every weight is the whole one, whatever the ranks held."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import huggingface
from irc.frontends.checkpoints import tensorrt_llm as checkpoint
from irc.ir.core import Module
from irc.weights import UnboundRef
from irc.weights.checkpoint import Reader
from irc.weights.safetensors import read_header
from tests.cli.runner import works
from tests.fresh import fresh
from tests.frontends.checkpoints.rank_folders import Arrays, Conversion, write_folder
from tests.models.golden import write_safetensors
from tests.models.runners import continued
from tests.models.test_transformers import checkpoint as transformers_model
from tests.models.test_transformers import greedy_of, tokens

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 53,
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 3e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}  # fmt: skip
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
BIASES = LLAMA | {"attention_bias": True, "mlp_bias": True}
TIED = LLAMA | {"tie_word_embeddings": True}

CASES: dict[str, tuple[dict[str, Any], Conversion]] = {
    "one rank": (LLAMA, Conversion()),
    "gqa": (LLAMA, Conversion(tp=2)),
    "shared key heads": (LLAMA, Conversion(tp=4)),
    "mqa": (LLAMA | {"num_key_value_heads": 1}, Conversion(tp=4)),
    "mha": (LLAMA | {"num_key_value_heads": 4}, Conversion(tp=4)),
    "stages": (LLAMA, Conversion(tp=2, pp=3)),
    "uneven stages": (LLAMA, Conversion(tp=2, pp=2)),
    "global layers": (LLAMA, Conversion(pp=2, local_layers=False)),
    "biases": (BIASES, Conversion(tp=4, pp=2)),
    "fused": (BIASES, Conversion(tp=2, fused=True)),
    "rows of the table": (LLAMA, Conversion(tp=4, table_dim=0)),
    "columns of the table": (LLAMA, Conversion(tp=2, table_dim=1)),
    "tied": (TIED, Conversion(tp=2, keep_head=False)),
    "tied rows": (TIED, Conversion(tp=4, keep_head=False, table_dim=0)),
    "tied with head": (TIED, Conversion(tp=2)),
    "head_dim": (LLAMA | {"head_dim": 10}, Conversion(tp=2)),
    "rope": (
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e5}},
        Conversion(tp=2),
    ),
    "qwen2": (QWEN2, Conversion(tp=4)),
    "qwen3": (
        LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 6},
        Conversion(tp=2),
    ),
    "mistral": (MISTRAL, Conversion(tp=2)),
    "experts by width": (MIXTRAL, Conversion(tp=2)),
    "experts by rank": (MIXTRAL, Conversion(tp=4, moe_ep=4)),
    "experts by both": (MIXTRAL, Conversion(tp=4, moe_ep=2, pp=2)),
}


def tensors_of(config: dict[str, Any]) -> Arrays:
    """Random weights of a model, by their keys in transformers."""
    random, found = fresh(), Arrays()
    for weight in huggingface.model_of(config).trace("f32").weights.values():
        sources = [s for s in weight.ref.sources() if isinstance(s, UnboundRef)]
        for source in sources:
            shape = tuple(int(str(n)) for n in weight.type.shape)[-2 if len(sources) > 1 else 0 :]
            found[source.key] = random.standard_normal(shape, np.float32)
    return found


def check_weights(module: Module, folder: Path, config: dict[str, Any], tensors: Arrays) -> None:
    """Compare every weight with that of the same model as a folder of transformers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    wanted = huggingface.load(folder)
    for name, weight in wanted.weights.items():
        expected = Reader(wanted).read(weight.ref)
        np.testing.assert_array_equal(Reader(module).read(module.weights[name].ref), expected, name)
    if wanted.weights.keys() == module.weights.keys():
        assert graph(module) == graph(wanted)


def graph(module: Module) -> str:
    """The text of a module without its weights and files."""
    lines = str(module).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("  weight ", "  file ")))


@pytest.mark.parametrize("name", CASES)
def test_weights(name: str, tmp_path: Path) -> None:
    config, how = CASES[name]
    tensors = tensors_of(config)
    module = checkpoint.load(write_folder(tmp_path / "ranks", config, tensors, how))
    check_weights(module, tmp_path / "whole", config, tensors)
    assert str(irc.parse(str(module))) == str(module)
    head = module.weights.get("lm_head.weight")
    assert (head is not None) == (how.keep_head or not config.get("tie_word_embeddings"))
    if head is not None and config.get("tie_word_embeddings"):
        found = Reader(module).read(head)
        np.testing.assert_array_equal(found, tensors["model.embed_tokens.weight"])


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an old name": (
        LLAMA,
        {"architecture": "LLaMAForCausalLM", "hidden_act": "swiglu", "moe": None},
    ),
    "what ModelOpt adds": (LLAMA, {"rank": 0, "rmsnorm": True, "moe_num_experts": 0}),
    "defaults": (LLAMA, {"mapping": {}, "head_size": None, "quantization": None}),
    "qwen": (QWEN2, {"architecture": "QWenForCausalLM", "qwen_type": "qwen2", "num_labels": 1}),
}


@pytest.mark.parametrize("name", SAME)
def test_other_ways_to_write_a_config(name: str, tmp_path: Path) -> None:
    config, changes = SAME[name]
    tensors = tensors_of(config)
    plain = write_folder(tmp_path / "plain", config, tensors, Conversion())
    other = write_folder(tmp_path / "other", config, tensors, Conversion(), **changes)
    assert graph(checkpoint.load(other)) == graph(checkpoint.load(plain))


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["gqa_tied_bias", "mha_tied_odd"])
@pytest.mark.parametrize("how", [Conversion(tp=4, table_dim=0), Conversion(tp=2, pp=2)])
def test_tokens_on_other_meshes(case: str, how: Conversion, tmp_path: Path) -> None:
    """A folder of four ranks gives the tokens of transformers on 1, 2 and 3 ranks."""
    model = transformers_model(tmp_path / "hf", case, changes={"intermediate_size": 84})
    tensors = {key: value.numpy() for key, value in model.state_dict().items()}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    folder = write_folder(tmp_path / "ranks", config, tensors, how)
    prompt = tokens(7)[:1]
    wanted = greedy_of(model, prompt, 12)[0].tolist()
    for mesh in ("", "tp=2", "tp=3"):
        out = tmp_path / f"out{mesh}"
        artifact = irc.compile(folder, out, mesh=mesh, backend="reference")
        assert continued(artifact, prompt[0].tolist(), 12) == wanted, mesh


def changed(folder: Path, rank: int, change: Callable[[Arrays], object]) -> None:
    """Rewrite the file of a rank."""
    path = folder / f"rank{rank}.safetensors"
    tensors = {
        key: np.fromfile(path, np.float32, info.nbytes // 4, offset=info.offset).reshape(info.shape)
        for key, info in read_header(path).items()
    }
    change(tensors)
    write_safetensors(path, tensors)


FC, QKV = "transformer.layers.1.mlp.fc.weight", "transformer.layers.0.attention.qkv.weight"


def misnamed(tensors: Arrays) -> None:
    tensors[FC.replace(".fc.", ".fcc.")] = tensors.pop(FC)


def every(name: str, change: Callable[[Any], Any]) -> Callable[[Arrays], object]:
    """A change of one tensor."""
    return lambda tensors: tensors.update({name: change(tensors[name])})


EQUAL = "on ranks of one stage; expected equal shapes"
# name -> (change, whether of both ranks, parts of the message)
WRONG: dict[str, tuple[Callable[[Arrays], object], bool, list[str]]] = {
    "on one rank": (lambda t: t.pop(FC), False, [f"{FC} is not on all ranks", "on number 0 of"]),
    "misnamed": (
        misnamed,
        True,
        [
            "which are missing:\n    model.layers.1.mlp.gate_proj.weight",
            "does not use them:\n    transformer.layers.1.mlp.fcc.weight",
            "mlp.gate_proj in mlp.fc",
            "--set ignore=",
        ],
    ),
    "another shape": (every(FC, lambda x: x[1:]), False, [f"f32[19, 24] and f32[20, 24] {EQUAL}"]),
    "shapes": (
        every(FC, lambda x: x[1:]),
        True,
        ["mlp.gate_proj.weight is f32[38, 24], but the model takes f32[40, 24]"],
    ),
    "vocabulary": (
        every("lm_head.weight", lambda x: x[:3]),
        True,
        ["lm_head.weight is f32[6, 24]"],
    ),
    "dtype": (
        every(FC, lambda x: x.astype(np.int32)),
        True,
        ["mlp.gate_proj.weight is i32[40, 24], which does not convert to f32"],
    ),
    "heads": (
        every(QKV, lambda x: x[1:]),
        True,
        [f"{QKV} is f32[23, 24]; expected a multiple of 4 rows"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_fit(name: str, tmp_path: Path) -> None:
    change, both, messages = WRONG[name]
    folder = write_folder(tmp_path / "m", LLAMA, tensors_of(LLAMA), Conversion(tp=2))
    for rank in range(1 + both):
        changed(folder, rank, change)
    with pytest.raises(irc.Error) as caught:
        checkpoint.load(folder)
    for message in messages:
        assert message in str(caught.value)


def test_tensors_that_are_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA, tensors_of(LLAMA), Conversion())
    more = {"transformer.layers.0.adapter.weight": np.ones(3, np.float32)}
    changed(folder, 0, lambda tensors: tensors.update(more))
    with pytest.raises(irc.Error, match="does not use them:\n    transformer"):
        checkpoint.load(folder)
    checkpoint.load(folder, ignore=["*.adapter.weight"])


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "GPTForCausalLM"}, "irc reads LlamaForCausalLM, LLaMAForC"),
    "multiplier": ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0: irc computes Llama"),
    "positions": ({"position_embedding_type": "alibi"}, "irc's families have rope_gpt_neox"),
    "limits": ({"clip_qkv": 8.0}, "clip_qkv=8.0: irc computes LlamaForCausalLM without it"),
    "an unknown key": ({"clip": 8.0}, "clip=8.0, which irc does not support"),
    "ranks": ({"mapping": {"tp_size": 4, "world_size": 4}}, "lacks rank2.safetensors, rank3.safe"),
    "fewer ranks": ({"mapping": {"tp_size": 1}}, "has rank1.safetensors, but config.json has tp_s"),
    "world": ({"mapping": {"tp_size": 2, "world_size": 3}}, "world_size=3, but tp_size x pp_size"),
    "layers": ({"num_hidden_layers": 4}, "has 3 layers in 1 pipeline stages, but num_hidden_layer"),
    "heads": (
        {"num_attention_heads": 5, "num_key_value_heads": 5},
        "tp_size=2 does not fit 5 heads with 5 key and value",
    ),
    "experts": ({"moe": {"num_experts": 4}}, "irc's llama has no such layer"),
    "routing": (
        {"architecture": "MixtralForCausalLM", "moe": {"num_experts": 4, "normalization_mode": 0}},
        "irc's mixtral has no such layer",
    ),
    "qwen": ({"architecture": "QWenForCausalLM", "qwen_type": "qwen"}, "irc has the architecture"),
    "no keys": ({"num_key_value_heads": 0}, "does not fit 4 heads with 0 key and value heads"),
    "table": ({"use_parallel_embedding": 1}, "use_parallel_embedding is 1; expected true or false"),
    "dimension": ({"embedding_sharding_dim": 2}, r"expected 0 \(rows\) or 1 \(columns\)"),
    "activation": ({"hidden_act": None}, "config.json lacks the key hidden_act"),
    "algorithm": (
        {"quantization": {"quant_algo": "W8A17"}},
        "no quantization scheme 'W8A17'; did you mean",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_are_refused(name: str, tmp_path: Path) -> None:
    changes, message = CONFIGS[name]
    tensors = tensors_of(LLAMA)
    folder = write_folder(tmp_path / "m", LLAMA, tensors, Conversion(tp=2), **changes)
    with pytest.raises(irc.Error, match=message):
        checkpoint.load(folder)


def test_gaps_between_layers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA, tensors_of(LLAMA), Conversion(pp=3))
    key = "transformer.layers.0."

    def renumber(tensors: Arrays) -> None:
        for name in [name for name in tensors if name.startswith(key)]:
            tensors[name.replace(key, "transformer.layers.7.")] = tensors.pop(name)

    changed(folder, 1, renumber)
    with pytest.raises(irc.Error, match=r"stage 1 are \[7\]; expected 0, 1, ... or 1, 2"):
        checkpoint.load(folder)


def test_the_command_line_takes_such_folders(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA, tensors_of(LLAMA), Conversion(tp=4))
    words = ("compile", folder, "--mesh", "tp=3", "--backend", "reference")
    works(*words, "-o", tmp_path / "out", "--dtype", "bf16", "--dims", "B=1:1:2")
    artifact = irc.load(tmp_path / "out")
    assert artifact.manifest["dtype"] == "bf16" and artifact.module.mesh.ranks == 3
    works(*words, "--dry-run", "--random-weights", "1")
