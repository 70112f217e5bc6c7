"""`irc show --weights`: bytes as the checkpoint has them, what ranks hold, and why."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from irc.analysis.weights import weight_table
from irc.artifact.manifest import INPUT
from irc.cli.sources import read_module
from tests.cli.runner import irc, refused, works
from tests.tiny_checkpoint import write_checkpoint


def groups(place: Path, *words: str) -> dict[str, dict[str, Any]]:
    found = works("show", place, "--weights", *words, "--json").json["weights"]
    assert [g["nbytes"] * g["count"] for g in found] == sorted(
        (g["nbytes"] * g["count"] for g in found), reverse=True
    )
    assert sum(g["share"] for g in found) <= 1.0001
    return {group["name"]: group for group in found}


def test_bytes_are_those_of_the_checkpoint(artifact: Path, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    found = groups(artifact)
    assert sum(g["nbytes"] * g["count"] for g in found.values()) == sum(
        array.nbytes for array in tensors.values()
    )
    assert sum(g["share"] for g in found.values()) == pytest.approx(1)
    for name, group in found.items():
        same = [key for key in tensors if re.fullmatch(re.escape(name).replace(r"\*", r"\d+"), key)]
        assert len(same) == group["count"]
        assert group["nbytes"] == tensors[same[0]].nbytes
        assert group["shape"] == [*tensors[same[0]].shape]
        assert group["source"] == "model.safetensors" and group["ranks"] == 1
    layer = groups(artifact, "--scope", "model.layers.1.mlp")
    assert len(layer) == 3 and all(name.startswith("model.layers.1.mlp") for name in layer)
    assert "no operation is in the scope" in refused("show", artifact, "--weights", "--scope", "no")


def test_shards_and_reasons_of_two_ranks(tmp_path: Path) -> None:
    """Three query heads of one key-value head over two ranks, and a plan of the user."""
    folder = write_checkpoint(tmp_path / "ck", num_key_value_heads=1)
    words = ("compile", folder, "-o")
    works(*words, tmp_path / "chosen", "--mesh", "tp=2")
    found = groups(tmp_path / "chosen")
    embedding = found["model.embed_tokens.weight"]
    assert embedding["sharded"] == ["0@tp"] and embedding["ranks"] == 2
    assert embedding["rank_nbytes"] == math.ceil(300 / 2) * 32 * 4
    assert embedding["nbytes"] == 300 * 32 * 4
    norm = found["model.layers.*.input_layernorm.weight"]
    assert not norm["sharded"] and norm["why"] == "no product and no lookup uses it"
    head = found["model.layers.*.self_attn.k_proj.weight"]
    assert not head["sharded"] and head["rank_nbytes"] == 2 * head["nbytes"]
    plan = tmp_path / "plan.txt"
    plan.write_text("*.down_proj.weight 1@tp\n*_proj.weight replicated\n")
    works(*words, tmp_path / "planned", "--mesh", "tp=2", "--plan", plan)
    found = groups(tmp_path / "planned")
    assert found["model.layers.*.mlp.gate_proj.weight"]["why"].endswith("plan.txt:2")
    assert found["model.layers.*.mlp.down_proj.weight"]["why"] == ""
    text = works("show", tmp_path / "planned", "--weights").out
    assert re.search(r"gate_proj.weight × 2 .* replicated on 2 ranks: .*plan.txt:2  model\.", text)
    notes = ["@model.norm.weight stays replicated: as asked"]
    (norm,) = (
        group
        for group in weight_table(read_module(str(tmp_path / "planned")), notes)
        if group.name == "model.norm.weight"
    )
    assert norm.layout == "replicated on 2 ranks: as asked"
    (tmp_path / "planned" / INPUT).unlink()
    answer = irc("show", tmp_path / "planned", "--weights")
    assert answer.status == 0 and f"has no {INPUT}" in answer.err


def test_stages_hold_their_layers(checkpoint: Path, tmp_path: Path) -> None:
    works("compile", checkpoint, "-o", tmp_path / "out", "--mesh", "pp=2")
    found = groups(tmp_path / "out")
    layer = found["model.layers.*.mlp.up_proj.weight"]
    assert layer["ranks"] == 1 and layer["count"] == 2
    assert layer["rank_nbytes"] == layer["nbytes"] == 48 * 32 * 4


def test_modules_without_weights_or_functions(tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text("module @m {\n}\n")
    assert groups(tmp_path / "m.irc") == {}
    assert works("show", tmp_path / "m.irc", "--weights").out.endswith("0 weights, 0 B\n")
    (tmp_path / "w.irc").write_text(
        "module @m {\n  weight @w : i4[3, 3] = zeros([3, 3], i4)\n"
        "  func @f(%x: f32[2]) -> (f32[2]) {\n    return %x\n  }\n}\n"
    )
    assert groups(tmp_path / "w.irc")["w"]["nbytes"] == 5
    assert "computed" in works("show", tmp_path / "w.irc", "--weights").out
    assert "cannot read" in refused("show", tmp_path / "missing", "--weights")
    assert "no config.json" in refused("show", tmp_path, "--weights")
