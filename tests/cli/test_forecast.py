"""`irc forecast`: of config.json alone, agreement with what is compiled, and errors."""

import json
import time
from pathlib import Path
from typing import Any

import onnx
import pytest

from irc.ir.mesh import Mesh
from tests.cli.runner import Answer, works
from tests.layout import ROOT
from tests.tiny_checkpoint import CONFIG, write_checkpoint

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def config_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint folder whose weight file has to stay closed."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"no such format")
    return folder


def phases(answer: Answer) -> dict[str, Any]:
    return {phase["name"]: phase for phase in answer.json["phases"]}


def test_a_70b_shape_from_its_config_alone(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "llama", LLAMA_70B)
    began = time.process_time()
    found = phases(works("forecast", folder, "--mesh", "tp=8", "--json"))
    assert time.process_time() - began < 10  # s; 0.3 on a quiet machine
    decode, prefill = found["decode"], found["prefill"]
    (memory,) = decode["memory"]
    parameters = 70_553_706_496
    assert memory["weights"] == pytest.approx(2 * parameters / 8, rel=0.001)
    assert memory["states"] == 80 * 2 * 1 * 8192 * 128 * 2  # one key and value head of eight
    reduced = [row for row in decode["collectives"] if row["kind"] == "all_reduce"]
    assert sum(row["count"] for row in reduced) == 2 * 80 + 1  # layers, and the embedding
    assert sum(row["sent_per_token"] for row in reduced) == 161 * 2 * 7 / 8 * 8192 * 2
    # one step reads at least 17.6 GB at 4.26 TB/s
    times = decode["us"]
    assert times["roofline"] > memory["weights"] / 4264e3 * 0.95
    parts = (times[part] for part in ("roofline", "kernels", "collectives"))
    assert times["total"] == pytest.approx(sum(parts))
    assert decode["tokens_before"] == 8191
    assert prefill["sizes"]["S"] == 128


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "tp=3", "pp=2,tp=2"])
def test_weights_are_those_of_the_artifact(tmp_path: Path, mesh: str) -> None:
    """Odd sizes, so that ranks have padding: the forecast agrees with the model of each rank."""
    folder = write_checkpoint(tmp_path / "llama", vocab_size=301)
    works("compile", folder, "-o", tmp_path / "out", "--mesh", mesh)
    stages = phases(works("forecast", folder, "--mesh", mesh, "--json"))["decode"]["memory"]
    models = sorted((tmp_path / "out").glob("*.onnx"))
    assert len(models) == (1 if mesh == "tp=1" else Mesh.parse(mesh).ranks)
    for rank, path in enumerate(models):
        said = stages[rank * len(stages) // len(models)]["weights"]
        assert said == pytest.approx(outside_bytes(path), rel=0.05)


def outside_bytes(path: Path) -> int:
    """The bytes of the weights that a model takes from other files."""
    model = onnx.load(path, load_external_data=False)
    entries = [entry for each in model.graph.initializer for entry in each.external_data]
    return sum(int(entry.value) for entry in entries if entry.key == "length")


def test_tokens_and_sizes(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "llama", CONFIG)
    options = ("--tokens", "40", "--dims", "B=3,C=64", "--json")
    found = phases(works("forecast", folder, *options))
    assert found["prefill"]["sizes"] == {"B": 3, "S": 40, "T": 1, "C": 64}
    assert found["decode"]["sizes"] == {"B": 3, "S": 1, "T": 1, "C": 64}
    assert (found["decode"]["tokens_before"], found["prefill"]["tokens_before"]) == (40, 0)
    assert found["decode"]["memory"][0]["states"] == 2 * 2 * 3 * 2 * 64 * 8 * 4
    assert (found["decode"]["tokens"], found["prefill"]["tokens"]) == (3, 3 * 40)
    longer = phases(works("forecast", folder, "--tokens", "80", "--dims", "C=80", "--json"))
    assert longer["decode"]["tokens_before"] == 79  # the caches are full then


def test_the_text(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "tiny", CONFIG)
    text = works("forecast", folder, "--mesh", "pp=2,tp=2").out
    stages = ("4 ranks (pp=2, tp=2) of NVIDIA H200, nvlink", "stage 0", "stage 1", "x send")
    for words in (*stages, "decode: 1 token after 95 others"):
        assert words in text
    note = "nothing is sharded over the mesh axis cp: its 2 ranks do the same"
    assert note in works("forecast", folder, "--mesh", "cp=2,tp=2").out
    assert works("forecast", folder, "--mesh", "tp=2", "--json").json["notes"] == []
    folder = config_folder(tmp_path / "large", LLAMA_70B)
    assert "GB of 150.1 GB: too much" in works("forecast", folder, "--dims", "B=64").out


def test_slower_links_take_longer(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "llama", CONFIG)
    times = [
        phases(works("forecast", folder, "--mesh", "tp=2", "--link", link, "--json"))["prefill"]
        for link in ("nvlink", "pcie", "ethernet")
    ]
    us = [each["us"]["collectives"] for each in times]
    assert us == sorted(us)
    assert us[0] < us[1] < us[2]


def test_a_module_that_is_no_language_model() -> None:
    script = ROOT / "examples" / "two_tower.py"
    answer = works("forecast", script, "--json")
    assert list(phases(answer)) == ["run"]
    assert "run: once (B=16" in works("forecast", script).out


def test_a_local_module_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text(
        """module @m local mesh(tp=2) {
  weight @w : bf16[8, 4] of bf16[16@tp, 4] = unbound("w", [16, 4]).shard(0, tp)
  func @forward(%x: bf16[4]) -> (y: bf16[16]) {
    %a = linear %x, @w : bf16[8] of bf16[16@tp]
    %y = all_gather %a {axis="tp", dim=0, group_size=2} : bf16[16]
    return %y
  }
}"""
    )
    (run,) = works("forecast", tmp_path / "m.irc", "--json").json["phases"]
    assert run["memory"][0]["weights"] == 8 * 4 * 2
    (row,) = run["collectives"]
    assert (row["kind"], row["bytes"], row["sent"]) == ("all_gather", 32, 16)


def test_weights_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    """A bf16 checkpoint that is computed in f32 stays bf16 in its files."""
    words = [ROOT / "examples" / "tiny_llama", "--mesh", "tp=2", "--dtype", "f32"]
    works("compile", *words, "-o", tmp_path / "out")
    (memory,) = phases(works("forecast", *words, "--json"))["decode"]["memory"]
    stored = outside_bytes(tmp_path / "out" / "rank0.onnx")
    assert memory["weights"] == pytest.approx(stored, rel=0.05)
