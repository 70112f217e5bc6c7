"""`irc compile`: outputs, errors, and no files after a failure."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from irc.driver import load
from irc.weights.safetensors import read_header
from tests.cli.runner import PROGRAM, entries, refused, shell, works
from tests.layout import ROOT
from tests.models.golden import write_safetensors
from tests.tiny_checkpoint import CONFIG, write_checkpoint


def test_a_checkpoint_folder(artifact: Path, checkpoint: Path) -> None:
    files = ["config.json", "module.irc", "rank0.onnx", "report.html", "tokenizer.json"]
    assert entries(artifact) == files
    manifest = json.loads((artifact / "config.json").read_text())
    weights = str(checkpoint / "model.safetensors")
    assert list(manifest["weights"]) == [weights]
    assert manifest["weights"][weights]["size"] == Path(weights).stat().st_size
    assert (manifest["dtype"], manifest["backend"]) == ("f32", "onnx")
    assert manifest["end_tokens"] == [299]
    assert manifest["dims"]["C"] == [1, 96, 96]
    assert "gated_mlp" in (artifact / "module.irc").read_text()


def test_what_is_printed(checkpoint: Path, tmp_path: Path) -> None:
    answer = works("compile", checkpoint, "-o", tmp_path / "out")
    assert re.search(r"^llama: \d+ operations, 34,720 parameters, 138.9 kB$", answer.out, re.M)
    fused = r"^  fuse-gated-mlp\S* +43 -> 37 ops +[\d.]+ ms +gated_mlp: 2$"
    assert re.search(fused, answer.out, re.M)
    assert re.search(rf"^wrote {tmp_path}/out for onnx: [\d.]+ kB in [\d.]+ s$", answer.out, re.M)
    facts = works("compile", checkpoint, "-o", tmp_path / "out", "--json").json
    assert facts["artifact"] == str(tmp_path / "out")
    assert facts["passes"][0]["pass"] == "inline"


@pytest.mark.parametrize("source", ["folder", "script"])
def test_what_a_checkpoint_has_and_irc_ignores_is_said(tmp_path: Path, source: str) -> None:
    folder = write_checkpoint(tmp_path / "model")
    words = ["-o", tmp_path / "out"]
    words += (
        [folder] if source == "folder" else [ROOT / "examples" / "llama.py", "--checkpoint", folder]
    )
    plain = works("compile", *words).out
    assert "ignored" not in plain and "max_position" not in plain
    (folder / "adapter_config.json").write_text("{}")
    config = {"do_sample": True, "num_beams": 1, "repetition_penalty": 1.1, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(config))
    said = works("compile", *words, "--dims", "C=1:96:500").out
    assert "C=500 is beyond max_position_embeddings=96 of config.json" in said
    assert "adapter_config.json is ignored: to use the adapter, merge it" in said
    assert "do_sample, repetition_penalty of the checkpoint: ignored, irc generate chooses" in said
    assert "do_sample" in works("compile", *words, "--dry-run").out


def test_a_script_with_settings(script: Path, tmp_path: Path) -> None:
    words = ["-o", tmp_path / "out", "--random-weights", "3"]
    works("compile", script, *words, "--set", "width=5")
    assert "f32[5, 4] = random(" in works("show", tmp_path / "out").out
    works("compile", f"{script}:other", *words)
    assert "f32[3, 4] = random(" in works("show", tmp_path / "out").out
    works("compile", script, *words, "--dtype", "bf16")
    assert "bf16[8, 4] = random(" in works("show", tmp_path / "out").out


def test_a_module_and_an_artifact_compile_again(artifact: Path, tmp_path: Path) -> None:
    works("compile", artifact / "module.irc", "-o", tmp_path / "a")
    works("compile", artifact, "-o", tmp_path / "b")
    for name in "ab":
        written = (tmp_path / name / "rank0.onnx").read_bytes()
        assert written == (artifact / "rank0.onnx").read_bytes()
    assert (tmp_path / "b" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["end_tokens"] == [299]


def test_relative_weights_of_a_module_start_at_its_file(checkpoint: Path, tmp_path: Path) -> None:
    works("compile", checkpoint, "-o", tmp_path / "a", "--pipeline", "")
    text = (tmp_path / "a" / "module.irc").read_text()
    (checkpoint / "model.irc").write_text(text.replace(f"{checkpoint}/", ""))
    try:
        works("compile", checkpoint / "model.irc", "-o", tmp_path / "b", "--pipeline", "")
    finally:
        (checkpoint / "model.irc").unlink()
    assert (tmp_path / "b" / "module.irc").read_text() == text


def test_random_weights_of_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    works("compile", tmp_path / "model", "--random-weights", "7", "-o", tmp_path / "out")
    assert "has no weights" in refused("compile", tmp_path / "model", "-o", tmp_path / "no")


def test_dims_are_replaced(checkpoint: Path, tmp_path: Path) -> None:
    works("compile", checkpoint, "-o", tmp_path / "out", "--dims", "B=1,C=1:32:64")
    manifest = json.loads((tmp_path / "out" / "config.json").read_text())
    assert manifest["dims"]["B"] == [1, 1, 1]
    assert manifest["dims"]["C"] == [1, 32, 64]


def test_the_pipeline_is_replaced(checkpoint: Path, tmp_path: Path) -> None:
    words = ["compile", checkpoint, "-o", tmp_path / "out", "--pipeline", "dce"]
    works(*words, "--dump-dir", tmp_path / "dumps")
    assert "gated_mlp" not in (tmp_path / "out" / "module.irc").read_text()
    assert entries(tmp_path / "dumps") == ["000-input.irc", "001-dce.irc"]


def test_a_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    answer = works("compile", checkpoint, "-o", tmp_path / "out", "--dry-run")
    assert "nothing written (dry run)" in answer.out
    assert "nothing written" in works("compile", checkpoint, "--dry-run").out
    assert entries(tmp_path) == []


def test_weights_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    works("compile", "model", "-o", "out")
    manifest = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(manifest["weights"]) == [str(tmp_path / "model" / "model.safetensors")]
    monkeypatch.chdir("/")
    words = ["--prompt", "1 2", "--raw-ids", "--max-new-tokens", "3"]
    works("generate", tmp_path / "out", *words)
    works("generate", tmp_path / "out", *words, "--backend", "reference")


def test_a_path_that_is_not_utf_8_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd \xff"))
    shutil.copytree(checkpoint, odd)
    err = refused("compile", odd, "-o", tmp_path / "out")
    assert "odd \\udcff/model.safetensors is not UTF-8; rename it, or give a link to it" in err
    (tmp_path / "link").symlink_to(odd)
    works("compile", tmp_path / "link", "-o", tmp_path / "out", "--bundle")


def test_random_weights_are_bundled_too(script: Path, tmp_path: Path) -> None:
    words = ["compile", script, "--random-weights", "3", "-o"]
    works(*words, tmp_path / "near")
    works(*words, tmp_path / "out", "--bundle")
    assert "rank0.weights" not in entries(tmp_path / "out")
    assert "rank0.safetensors" in entries(tmp_path / "out")
    x = {"x": np.ones((2, 4), np.float32)}
    near, out = (load(tmp_path / name).run(x)["y"] for name in ("near", "out"))
    np.testing.assert_array_equal(near, out)


def test_the_same_input_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    for seed in ("1", "2"):
        output = tmp_path / seed / "out"
        subprocess.run(
            [*PROGRAM, "compile", str(checkpoint), "-o", str(output)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
    first, second = tmp_path / "1" / "out", tmp_path / "2" / "out"
    assert entries(first) == entries(second)
    for name in entries(first):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_tensors_that_no_weight_needs_are_left_out_on_request(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    write_safetensors(folder / "more.safetensors", {"extra.a": np.ones(1, np.float32)})
    files = {"extra.a": "more.safetensors"}
    files |= dict.fromkeys(read_header(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    words = ("compile", folder, "--dry-run")
    assert "leave tensors out with --set ignore=lm_head.*" in refused(*words)
    works(*words, "--set", "ignore=extra.*")


def test_unsupported_operations_are_one_error(tmp_path: Path) -> None:
    path = tmp_path / "m.irc"
    path.write_text(
        "module @m mesh(tp=2) {\n  func @f(%x: f32[4]) -> (f32[4@tp]) {\n"
        '    %a = shard_slice %x {axis="tp", dim=0} : f32[4@tp] loc("model.py":3)\n'
        "    return %a\n  }\n}\n"
    )
    err = refused("compile", path, "--dry-run", "--pipeline", "")
    assert "the backend onnx cannot run this module" in err
    assert "model.py:3: shard_slice" in err


def test_a_folder_of_others_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my own")
    err = refused("compile", checkpoint, "-o", tmp_path)
    assert "not empty and no artifact of irc, so it is left alone" in err
    assert entries(tmp_path) == ["notes.txt"]
    out = tmp_path / "artifact"
    works("compile", checkpoint, "-o", out)
    works("compile", checkpoint, "-o", out)
    (out / "runs").mkdir()
    for name in ("runs/y.npz", "my.txt"):
        (out / name).write_text("my own")
    before, err = entries(out), refused("compile", checkpoint, "-o", out)
    assert "would be replaced, and with it my.txt and 1 more, which irc did not write" in err
    assert entries(out) == before and (out / "runs" / "y.npz").read_text() == "my own"
    err = refused("compile", checkpoint, "-o", checkpoint)
    assert "would be replaced, and with it the weights in" in err


def limited(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size", [0, 1000, 20_000, 100_000])
def test_a_disk_that_fills_leaves_nothing(checkpoint: Path, tmp_path: Path, size: int) -> None:
    """The size of files is limited: the first of them that grows larger fails like a full disk."""
    output = tmp_path / "build" / "out"
    done = subprocess.run(
        [*PROGRAM, "compile", str(checkpoint), "-o", str(output), "--bundle"],
        cwd=ROOT,
        preexec_fn=lambda: limited(size),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "error: the disk is full (File too large), and of " in done.stderr
    assert entries(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("older", [False, True], ids=["new", "over an older artifact"])
def test_an_interruption_leaves_nothing(
    script: Path, checkpoint: Path, number: signal.Signals, status: int, older: bool
) -> None:
    build = script.parent / "build"
    if older:
        works("compile", checkpoint, "-o", build / "out")
    # 800 MB of random numbers take about twenty seconds of a core
    words = ["compile", str(script), "--set", "width=50000000", "--random-weights", "1"]
    process = subprocess.Popen(
        [*PROGRAM, *words, "-o", str(build / "out")], cwd=ROOT, stderr=subprocess.PIPE
    )
    # not earlier: while packages are imported, their C code may drop a signal
    end = time.monotonic() + 120
    while not any(f.stat().st_size for f in build.glob(".out.*.part/rank0.weights")):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status
    assert b"Traceback" not in err
    assert not build.exists() if not older else entries(build) == ["out"]
    if older:
        load(build / "out")


def test_a_pass_of_the_user_learns_the_owner_of_its_name(tmp_path: Path) -> None:
    """Also in a process that has used no other pass."""
    (tmp_path / "dup.py").write_text(
        'from irc import Pass, Stats, register\n@register("cse")\nclass Mine(Pass):\n'
        "    def run(self, module, stats):\n        pass\n"
    )
    answer = shell("passes", "--load", tmp_path / "dup.py")
    assert answer.status == 1
    assert "a pass called 'cse' is registered already, by irc.passes.cse" in answer.err
