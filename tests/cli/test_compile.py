"""`irc compile`: outputs, bundles, sources that were changed, and no files after a failure."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from irc.driver import load
from irc.pipeline import parse_pipeline
from irc.weights.safetensors import read_header
from tests.cli.runner import PROGRAM, entries, refused, shell, works
from tests.layout import ROOT
from tests.models.golden import write_safetensors
from tests.tiny_checkpoint import CONFIG, write_checkpoint

WEIGHTS = "model.safetensors"
PROMPT = ["--prompt", "the", "--max-new-tokens", "8"]


def manifest(folder: Path) -> dict[str, Any]:
    """The object in config.json."""
    return json.loads((folder / "config.json").read_text())


def test_a_checkpoint_folder(artifact: Path, checkpoint: Path) -> None:
    written = ["config.json", "input.irc", "module.irc", "rank0.onnx", "report.html"]
    assert entries(artifact) == [*written, "tokenizer.json"]
    facts, weights = manifest(artifact), checkpoint / WEIGHTS
    assert list(facts["weights"]) == [str(weights)]
    assert facts["weights"][str(weights)]["size"] == weights.stat().st_size
    assert (facts["dtype"], facts["backend"], facts["end_tokens"]) == ("f32", "onnx", [299])
    assert facts["dims"]["C"] == [1, 96, 96]
    assert "gated_mlp" in (artifact / "module.irc").read_text()


def test_what_is_printed(checkpoint: Path, tmp_path: Path) -> None:
    out = works("compile", checkpoint, "-o", tmp_path / "out").out
    for line in (
        r"llama: \d+ operations, 34,720 parameters, 138.9 kB",
        r"  fuse-gated-mlp\S* +43 -> 37 ops +[\d.]+ ms +gated_mlp: 2",
        rf"wrote {tmp_path}/out for onnx: [\d.]+ kB in [\d.]+ s",
    ):
        assert re.search(f"^{line}$", out, re.MULTILINE), line
    facts = works("compile", checkpoint, "-o", tmp_path / "out", "--json").json
    assert facts["artifact"] == str(tmp_path / "out")
    assert facts["passes"][0]["pass"] == "inline"
    for output in (["-o", tmp_path / "none"], []):
        assert "nothing written" in works("compile", checkpoint, *output, "--dry-run").out
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize("source", ["folder", "script"])
def test_what_a_checkpoint_has_and_irc_ignores_is_said(tmp_path: Path, source: str) -> None:
    folder = write_checkpoint(tmp_path / "model")
    words = ["compile", "--dry-run"]
    words += [str(folder)] if source == "folder" else [f"{ROOT}/examples/llama.py"]
    words += [] if source == "folder" else ["--checkpoint", str(folder)]
    plain = works(*words).out
    assert "ignored" not in plain and "max_position" not in plain
    for name in ("training_args.bin", "pytorch_model.bin", "chat_template.jinja"):
        (folder / name).write_bytes(b"")
    (folder / "adapter_config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoConfig": "a.B"}}
    (folder / "config.json").write_text(json.dumps(config))
    config = {"do_sample": True, "num_beams": 1, "guidance_scale": 1.5, "eta_cutoff": 0.1}
    (folder / "generation_config.json").write_text(json.dumps(config))
    said = works(*words, "--dims", "C=1:96:500").out
    assert "C=500 is beyond max_position_embeddings=96 of config.json" in said
    (line,) = (line for line in said.splitlines() if "ignored" in line)
    assert line.endswith(
        f"ignored in {folder}: guidance_scale, eta_cutoff of generation_config.json (irc generate "
        "has no such setting); the chat template without irc generate --chat; adapter_config.json "
        f"(give --adapter {folder} to merge the adapter); pytorch_model.bin (weights are those of "
        "*.safetensors); auto_map of config.json (irc runs no code of checkpoints)"
    )


def test_settings_of_generation_in_another_file_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", do_sample=True, num_beams=4, min_length=0)
    said = works("compile", "--dry-run", str(folder)).out
    assert "do_sample, num_beams of config.json (put them into generation_config.json)" in said


def test_tensors_of_parts_that_irc_does_not_compute_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from irc.frontends.models import FAMILIES

    folder = write_checkpoint(tmp_path / "model")
    write_safetensors(folder / "vision.safetensors", {"vision.w": np.ones((2, 2), np.float32)})
    (folder / "model.safetensors").rename(folder / "text.safetensors")
    key = ("llama", "LlamaForCausalLM")
    monkeypatch.setitem(FAMILIES, key, replace(FAMILIES[key], unused=("vision.*", "audio.*")))
    said = works("compile", "--dry-run", folder).out
    assert f"ignored in {folder}: 1 tensors vision.* (irc computes the rest of the model)" in said


@pytest.mark.parametrize("name", ["org/Model-1B", "https://huggingface.co/org/Model-1B"])
def test_names_of_the_hub_are_downloaded_by_the_user(name: str, tmp_path: Path) -> None:
    wanted = "hf download org/Model-1B --local-dir Model-1B, then give Model-1B"
    assert wanted in refused("compile", name, "-o", tmp_path / "out")
    words = ("compile", f"{ROOT}/examples/llama.py", "-o", tmp_path / "out")
    assert wanted in refused(*words, "--checkpoint", name)
    folder = write_checkpoint(tmp_path / "model")
    assert wanted in refused("compile", folder, "-o", tmp_path / "out", "--adapter", name)
    assert "hf download" not in refused("compile", tmp_path / "model" / "b", "-o", tmp_path / "o")
    assert "hf download" not in refused("compile", "examples/b", "-o", tmp_path / "out")


def test_a_script_with_settings(script: Path, tmp_path: Path) -> None:
    words = ["-o", tmp_path / "out", "--random-weights", "3"]
    for source, more, weight in (
        (script, ["--set", "width=5"], "f32[5, 4] = random("),
        (f"{script}:other", [], "f32[3, 4] = random("),
        (script, ["--dtype", "bf16"], "bf16[8, 4] = random("),
    ):
        works("compile", source, *words, *more)
        assert weight in works("show", tmp_path / "out").out


def test_a_module_and_an_artifact_compile_again(
    artifact: Path, two_ranks: Path, checkpoint: Path, tmp_path: Path
) -> None:
    works("compile", artifact / "module.irc", "-o", tmp_path / "a")
    works("compile", artifact, "-o", tmp_path / "b")
    for name in "ab":
        written = (tmp_path / name / "rank0.onnx").read_bytes()
        assert written == (artifact / "rank0.onnx").read_bytes()
    assert (tmp_path / "b" / "tokenizer.json").exists()
    assert manifest(tmp_path / "b")["end_tokens"] == [299]
    works("compile", two_ranks, "-o", tmp_path / "c", "--checkpoint", checkpoint)
    text = (tmp_path / "c" / "module.irc").read_text()
    assert text == (two_ranks / "module.irc").read_text()


def test_relative_weights_of_a_module_start_at_its_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, "model")
    works("compile", "model", "-o", "a", "--pipeline", "")
    assert list(manifest(tmp_path / "a")["weights"]) == [str(tmp_path / "model" / WEIGHTS)]
    text = Path("a/module.irc").read_text()
    Path("model/model.irc").write_text(text.replace(f"{tmp_path}/model/", ""))
    monkeypatch.chdir("/")
    works("compile", tmp_path / "model/model.irc", "-o", tmp_path / "b", "--pipeline", "")
    assert (tmp_path / "b" / "module.irc").read_text() == text
    for more in ([], ["--backend", "reference"]):
        works("generate", tmp_path / "a", *PROMPT, *more)


def test_random_weights_of_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    works("compile", tmp_path, "--random-weights", "7", "-o", tmp_path / "out")
    assert "has no weights" in refused("compile", tmp_path, "-o", tmp_path / "no")


def test_dims_and_the_pipeline_are_replaced(checkpoint: Path, tmp_path: Path) -> None:
    words = ["compile", checkpoint, "-o", tmp_path / "out", "--pipeline", "dce"]
    works(*words, "--dump-dir", tmp_path / "dumps", "--dims", "B=1,C=1:32:64")
    assert "gated_mlp" not in (tmp_path / "out" / "module.irc").read_text()
    assert entries(tmp_path / "dumps") == ["000-input.irc", "001-dce.irc"]
    dims = manifest(tmp_path / "out")["dims"]
    assert (dims["B"], dims["C"]) == ([1, 1, 1], [1, 32, 64])


def test_a_pass_is_put_into_the_default_pipeline(checkpoint: Path, tmp_path: Path) -> None:
    words = ["compile", checkpoint, "-o", tmp_path / "out", "--quantize", "w8a16", "--mesh", "tp=2"]
    changed = [
        "--pipeline",
        "default, after quantize: expand{ops=[gated_mlp]}, without fuse-gated-mlp",
    ]
    works(*words)
    plain = parse_pipeline(manifest(tmp_path / "out")["pipeline"])
    works(*words, *changed)
    made = manifest(tmp_path / "out")["pipeline"]
    rest = [step for step in plain if step.name != "fuse-gated-mlp"]
    assert len(rest) < len(plain) and 'expand{ops=["gated_mlp"]}' in made
    assert [step for step in parse_pipeline(made) if step.name != "expand"] == rest
    at = [step.name for step in parse_pipeline(made)].index("expand")
    assert str(list(rest)[at - 1]) == 'quantize{scheme="w8a16"}'
    assert "has no such pass, but inline" in refused(*words, "--pipeline", "default, without x")
    assert "so --quantize has no effect" in refused(*words, "--pipeline", "cse, after cse: dce")


def test_a_path_that_is_not_utf_8_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd \xff"))
    shutil.copytree(checkpoint, odd)
    err = refused("compile", odd, "-o", tmp_path / "out")
    assert "odd \\udcff/model.safetensors is not UTF-8; rename it, or give a link to it" in err
    (tmp_path / "link").symlink_to(odd)
    works("compile", tmp_path / "link", "-o", tmp_path / "out", "--bundle")


def test_the_same_input_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1" / "out", tmp_path / "2" / "out"
    for output in (first, second):
        subprocess.run(
            [*PROGRAM, "compile", str(checkpoint), "-o", str(output)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": output.parent.name},
            capture_output=True,
            check=True,
        )
    assert entries(first) == entries(second)
    for name in entries(first):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_tensors_that_no_weight_needs_are_left_out_on_request(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    write_safetensors(folder / "more.safetensors", {"extra.a": np.ones(1, np.float32)})
    files = {"extra.a": "more.safetensors"}
    files |= dict.fromkeys(read_header(folder / WEIGHTS), WEIGHTS)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    words = ("compile", folder, "--dry-run")
    assert "leave tensors out with --set ignore=lm_head.*" in refused(*words)
    works(*words, "--set", "ignore=extra.*")


# ------------------------------------------------------------------ bundles


def test_a_bundle_needs_nothing_else(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    works("compile", folder, "-o", tmp_path / "near")
    works("compile", folder, "-o", tmp_path / "out", "--bundle")
    text = works("generate", tmp_path / "near", *PROMPT).out
    shutil.rmtree(folder)
    (tmp_path / "moved").mkdir()
    moved = Path(shutil.move(tmp_path / "out", tmp_path / "moved" / "here"))
    assert works("generate", moved, *PROMPT).out == text
    for place in (moved, moved / "module.irc"):
        assert works("generate", place, *PROMPT, "--backend", "reference").out == text
    assert 'file @weights = "rank0.safetensors"' in works("show", moved).out
    assert works("doctor", moved)
    err = refused("generate", tmp_path / "near", *PROMPT)
    assert f"the weight file {folder}/model.safetensors is gone; put it back, or compile" in err
    assert "--bundle" in err


@pytest.mark.parametrize("source", [".", "module.irc"])
def test_a_bundle_is_a_source(bundle: Path, tmp_path: Path, source: str) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "a bundle é"))
    text = works("generate", copy, *PROMPT).out
    works("compile", copy / source, "-o", tmp_path / "by reference")
    assert works("generate", tmp_path / "by reference", *PROMPT).out == text
    assert manifest(tmp_path / "by reference")["end_tokens"] == manifest(copy)["end_tokens"]
    before = entries(copy)
    err = refused("compile", copy / source, "-o", copy)
    assert "would be replaced, and with it the weights in" in err and "--bundle" in err
    assert entries(copy) == before
    works("compile", copy / source, "-o", copy, "--bundle")
    assert works("generate", copy, *PROMPT).out == text


@pytest.mark.parametrize(
    ("words", "says", "opens"),
    [
        ([], "irc opens it; rank0.onnx opens in plain ONNX Runtime if compiled with", False),
        (["--bundle"], "irc opens it, and plain ONNX Runtime opens rank0.onnx", True),
        (["--bundle", "--mesh", "tp=2"], "irc runs its ranks; ONNX Runtime has no", False),
    ],
)
def test_the_last_line_says_what_opens_a_model(
    checkpoint: Path, tmp_path: Path, words: list[str], says: str, opens: bool
) -> None:
    answer = works("compile", checkpoint, "-o", tmp_path / "out", *words)
    assert answer.out.splitlines()[-1].startswith(says)
    path = str(tmp_path / "out" / "rank0.onnx")
    if words:
        onnx.checker.check_model(path, full_check=True)
    try:
        onnxruntime.InferenceSession(path)
    except Exception:
        assert not opens
    else:
        assert opens


def test_random_weights_are_bundled_too(script: Path, tmp_path: Path) -> None:
    words = ["compile", script, "--random-weights", "3", "-o"]
    works(*words, tmp_path / "near")
    works(*words, tmp_path / "out", "--bundle")
    assert "rank0.weights" not in entries(tmp_path / "out")
    assert "rank0.safetensors" in entries(tmp_path / "out")
    x = {"x": np.ones((2, 4), np.float32)}
    near, out = (load(tmp_path / name).run(x)["y"] for name in ("near", "out"))
    np.testing.assert_array_equal(near, out)


# ------------------------------------------------------------------ sources that were changed


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """An artifact, its checkpoint beside it."""
    write_checkpoint(tmp_path / "checkpoint")
    works("compile", tmp_path / "checkpoint", "-o", tmp_path / "near")
    return tmp_path / "near"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("inside", ["", "module.irc", "rank0.onnx"])
def test_weights_that_were_changed(near: Path, tmp_path: Path, inside: str) -> None:
    trust = ["--trust"] if inside.endswith(".onnx") else []
    again = ("compile", near / inside, "-o", tmp_path / "again", *trust)
    works(*again)
    weights = tmp_path / "checkpoint" / WEIGHTS
    flip(weights)
    works("forecast", near)  # which reads no weights
    says = f"the weight file {weights} differs from that of the compilation"
    assert says in refused("generate", near, "--prompt", "a")
    (tmp_path / "again").rename(tmp_path / "first")
    err = refused(*again)
    assert says in err
    assert f"{near} is the source here: put the file back as it was" in err
    assert not (tmp_path / "again").exists()
    flip(weights)
    works(*again)


def test_another_checkpoint_of_the_same_size(near: Path, tmp_path: Path) -> None:
    again = ("compile", near, "-o", tmp_path / "again", "--checkpoint")
    other = write_checkpoint(tmp_path / "other", seed=8)
    assert (other / WEIGHTS).stat().st_size == (tmp_path / "checkpoint" / WEIGHTS).stat().st_size
    err = refused(*again, other)
    assert f"the weight file {other / WEIGHTS} differs from that of the compilation" in err
    assert "give the checkpoint that the model was compiled with" in err
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    works(*again, tmp_path / "moved")


def test_files_of_an_artifact_that_were_changed(near: Path, tmp_path: Path) -> None:
    """The text may be edited; no other file may."""
    text = (near / "module.irc").read_text()
    (near / "module.irc").write_text(text.replace("module @", "module @edited_", 1))
    for source in (near, near / "module.irc"):
        works("compile", source, "-o", tmp_path / "again")
        assert "module @edited_" in (tmp_path / "again" / "module.irc").read_text()
    flip(near / "rank0.onnx")
    says = f"{near / 'rank0.onnx'} was changed after it was compiled"
    assert says in refused("compile", near, "-o", tmp_path / "again")
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    words = ["--checkpoint", tmp_path / "moved"]
    assert says in refused("compile", near, "-o", tmp_path / "again", *words)


# ------------------------------------------------------------------ failures


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


@pytest.mark.parametrize("size", [0, 1000, 20_000, 100_000])
def test_a_disk_that_fills_leaves_nothing(checkpoint: Path, tmp_path: Path, size: int) -> None:
    """The size of files is limited: the first of them that grows larger fails like a full disk."""
    output = tmp_path / "build" / "out"
    done = subprocess.run(
        [*PROGRAM, "compile", str(checkpoint), "-o", str(output), "--bundle"],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
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
