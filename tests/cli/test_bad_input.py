"""Numbers, files and manifests that are wrong: a sentence each, no traceback and no waiting."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.artifact.manifest import add_facts
from tests.cli.runner import refused, works
from tests.tiny_checkpoint import write_checkpoint

DIGITS = "9" * 5000
FULL = """module @m {
  func @forward(%x: f32[2]) -> (y: f32[SHAPE]) {
    %y = full {value=1.0, shape=[SHAPE]} : f32[SHAPE]
    return %y
  }
}
"""


@pytest.mark.parametrize("shape", ["1099511627776, 64", "1099511627776, 1099511627776"])
def test_tensors_beyond_the_memory(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "m.irc"
    path.write_text(FULL.replace("SHAPE", shape))
    told = refused("run", path, "--backend", "reference", "--random", "0")
    assert told.startswith("error: this takes more memory than there is (")
    assert "give smaller sizes" in told


@pytest.mark.timeout(60)
def test_a_group_of_more_inputs_than_there_are(checkpoint: Path, tmp_path: Path) -> None:
    words = ("--quantize", "w4a16", "--group", "9999999999")
    works("compile", checkpoint, "-o", tmp_path / "out", *words)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "words",
    [
        ("compile", "CKPT", "-o", "out", "--mesh", "tp=2", "--plan", "PIPE"),
        ("compile", "CKPT", "-o", "out", "--quantize", "PIPE.json"),
        ("quality", "DIR", "--text", "PIPE"),
        ("calibrate", "CKPT", "--data", "PIPE.npz", "-o", "out"),
        ("calibrate", "CKPT", "--data", "PIPE.txt", "-o", "out"),
        ("run", "DIR", "--inputs", "PIPE.npz", "--outputs", "out.npz"),
        ("show", "PIPE"),
        ("diff", "PIPE", "PIPE"),
        ("forecast", "CKPT", "--topology", "PIPE"),
    ],
)
def test_pipes(
    words: tuple[str, ...],
    checkpoint: Path,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in set(words):
        if word.startswith("PIPE"):
            os.mkfifo(word)
    places = {"DIR": str(artifact), "CKPT": str(checkpoint)}
    assert "regular file" in refused(*(places.get(word, word) for word in words))


PROGRAMS: list[dict[str, Any]] = [
    *({"base": base} for base in (5, ["/"], "a\0b")),
    *({"axes": axes} for axes in (5, [1], [["tp"]], [["tp", "x"]])),
    *({"ranks": ranks} for ranks in (5, [5], {}, [{"model": 5}])),
    {"ranks": [{"model": "rank0.onnx", "bindings": 5}]},
]


@pytest.fixture(scope="module")
def folder(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of an artifact whose manifest may be changed."""
    path = tmp_path_factory.mktemp("artifact") / "out"
    shutil.copytree(artifact, path)
    return path


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_programs_of_manifests(program: dict[str, Any], artifact: Path, folder: Path) -> None:
    manifest = json.loads((artifact / "config.json").read_text())
    manifest["program"] |= program
    (folder / "config.json").write_text(json.dumps(manifest))
    add_facts(folder, {})  # whose hash is right, as anyone can compute it
    told = refused("show", folder / "rank0.onnx")
    assert str(folder / "config.json") in told


def test_the_rank_of_an_onnx_file(artifact: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(str(artifact / "rank0.onnx"), load_external_data=False)
    onnx.helper.set_model_props(model, {"irc.rank": DIGITS})
    for name in os.listdir(artifact):
        shutil.copy(artifact / name, tmp_path / name)
    onnx.save(model, str(tmp_path / "rank0.onnx"))
    works("show", tmp_path / "rank0.onnx")


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 2**63}, "expected a number of at most 2147483647"),
        ({"rms_norm_eps": 10**400}, "expected a number of at most 1e308"),
        ({"rope_theta": [1] * 100_000}, "expected a number"),
        ({"num_hidden_layers": "x" * 100_000}, "expected a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: expected a number of at"),
        ({**MIXTRAL, "num_local_experts": 10**9}, "1000000000 experts in"),
    ],
)
def test_numbers_of_a_config(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    for words in (("compile", tmp_path, "-o", tmp_path / "out"), ("forecast", tmp_path)):
        told = refused(*words)
        assert message in told and len(told) < 5000


@pytest.mark.parametrize("size", [1, 2**62])
def test_many_dimensions_in_a_safetensors_file(size: int, tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [size] * 100_000, "data_offsets": [0, 4]}
    header = json.dumps({"w": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "w.safetensors").write_bytes(data)
    text = FULL.replace("module @m {", 'module @m {\n  file @f = "w.safetensors"')
    text = text.replace("  func", '  weight @w : f32[1] = @f["w"]\n  func')
    text = text.replace("%y = full {value=1.0, shape=[SHAPE]}", "%y = add @w, @w")
    (tmp_path / "m.irc").write_text(text.replace("SHAPE", "1"))
    told = refused("compile", tmp_path / "m.irc", "-o", tmp_path / "out")
    assert "the tensor 'w' has no valid shape" in told
    assert len(told) < 5000


def test_results_of_any_name(tmp_path: Path) -> None:
    text = "module @m {\n  func @forward(%x: f32[2]) -> (file: f32[2], allow_pickle: f32[2]) {\n"
    text += "    %y = neg %x : f32[2]\n    return %y, %x\n  }\n}\n"
    (tmp_path / "m.irc").write_text(text)
    np.savez(tmp_path / "in.npz", x=np.ones(2, np.float32))
    works(
        *("run", tmp_path / "m.irc", "--backend", "reference"),
        *("--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz"),
    )
    with np.load(tmp_path / "out.npz") as outputs:
        assert [*outputs] == ["file", "allow_pickle"]
