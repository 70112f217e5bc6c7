"""The registry of model families: families of packages and of files, also of an encoder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.extensions.user_files import forget, name_of
from irc.frontends import huggingface
from irc.frontends.models import FAMILIES, find_family, register
from irc.frontends.models.families.llama import LLAMA
from irc.pipeline.load import load_file
from tests.installed import install

from .golden import write_safetensors

# An encoder that returns one vector a row, its projection tied to the table.
ENCODER = """
import irc
from irc.frontends import Module, models
from irc.frontends.layers import Embedding, Linear
from irc.weights import UnboundRef

class Encoder(Module):
    def __init__(self, size, dtype):
        self.table = Embedding(7, size, dtype)
        self.pooler = Linear(size, size, False, dtype)

    def forward(self, ids):
        return {"embedding": self.pooler(self.table(ids).mean(1))}

def signature(size, dtype):
    return models.Signature({"ids": irc.Spec("i32", ("B", 3))}, {"B": (1, 1, 4)})

models.register(
    models.Family(
        model_type="pooled",
        architectures=("PooledModel", "PooledEncoder"),
        read=lambda config: config.integer("size"),
        build=Encoder,
        signature=signature,
        alternatives=lambda size: {"pooler.weight": UnboundRef("head.weight")},
    )
)
"""
CONFIG = {"model_type": "pooled", "architectures": ["PooledEncoder"], "size": 2}


def check_encoder(folder: Path) -> None:
    """Load the encoder of a checkpoint folder and compare it with numpy."""
    folder.mkdir()
    table = np.arange(14, dtype=np.float32).reshape(7, 2)
    weight = np.array([[1, 2], [3, 4]], np.float32)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors", {"table.weight": table, "head.weight": weight})
    module = huggingface.load(folder)
    assert module.name == "pooled" and module.dims == {"B": (1, 1, 4)}
    found = irc.evaluate(module, {"ids": np.array([[0, 2, 4]], np.int32)})["embedding"]
    np.testing.assert_allclose(found, table[[0, 2, 4]].mean(0)[None] @ weight.T)


def test_a_file_that_the_user_loads_adds_a_family(tmp_path: Path) -> None:
    path = tmp_path / "encoder.py"
    path.write_text(ENCODER)
    try:
        assert load_file(path) == ["PooledModel", "PooledEncoder"]
        check_encoder(tmp_path / "model")
    finally:
        forget(name_of(path))
    assert not any(model_type == "pooled" for model_type, _ in FAMILIES)


def test_an_installed_package_adds_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, ENCODER, "irc_test_family", "irc.models")
    try:
        check_encoder(tmp_path / "model")
    finally:
        for key in [key for key in FAMILIES if key[0] == "pooled"]:
            del FAMILIES[key]


def test_a_family_is_registered_once() -> None:
    with pytest.raises(irc.Error, match=r"a family for LlamaForCausalLM .* is registered already"):
        register(LLAMA)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    ],
)
def test_families_are_found_by_either_key(config: dict[str, Any]) -> None:
    assert find_family(config) is LLAMA


def test_an_ignored_architecture_is_not_compared() -> None:
    config = {"model_type": "llama", "architectures": ["MyLlama"]}
    assert find_family(config, ignore=["architectures"]) is LLAMA
    with pytest.raises(irc.Error, match=r"sets architectures=.*expected LlamaForCausalLM or"):
        find_family(config)
