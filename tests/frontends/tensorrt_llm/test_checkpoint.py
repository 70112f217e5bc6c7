"""TensorRT-LLM checkpoint folders: every weight is the whole one, whatever the ranks held."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.frontends import huggingface
from irc.frontends.tensorrt_llm import checkpoint
from irc.ir.core import Module
from irc.weights import UnboundRef
from irc.weights.checkpoint import Reader
from tests.fresh import fresh
from tests.models.golden import write_safetensors
from tests.models.test_transformers import checkpoint as transformers_model
from tests.models.test_transformers import greedy_of, tokens

from .rank_folders import Arrays, Conversion, write_folder

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
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


@pytest.mark.parametrize("name", CASES)
def test_weights(name: str, tmp_path: Path) -> None:
    config, how = CASES[name]
    tensors = tensors_of(config)
    module = checkpoint.load(write_folder(tmp_path / "ranks", config, tensors, how))
    check_weights(module, tmp_path / "whole", config, tensors)
    assert str(irc.parse(str(module))) == str(module)
    has_head = "lm_head.weight" in module.weights
    assert has_head == (how.keep_head or not config.get("tie_word_embeddings"))


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
        found = artifact.model.generate_ids(prompt[0].tolist(), 12)
        assert list(found.tokens) == wanted, mesh
