"""`irc compile --bundle`: an artifact that needs nothing else, and can be compiled again."""

import json
import shutil
from pathlib import Path

import onnx
import onnxruntime
import pytest

from tests.cli.runner import entries, refused, works
from tests.tiny_checkpoint import write_checkpoint


def test_a_bundle_needs_nothing_else(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    works("compile", folder, "-o", tmp_path / "near")
    works("compile", folder, "-o", tmp_path / "out", "--bundle")
    words = ["--prompt", "the", "--max-new-tokens", "8"]
    text = works("generate", tmp_path / "near", *words).out
    shutil.rmtree(folder)
    moved = tmp_path / "moved" / "here"
    moved.parent.mkdir()
    shutil.move(tmp_path / "out", moved)
    assert works("generate", moved, *words).out == text
    assert works("generate", moved, *words, "--backend", "reference").out == text
    assert works("generate", moved / "module.irc", *words, "--backend", "reference").out == text
    assert 'file @weights = "rank0.safetensors"' in works("show", moved).out
    assert works("doctor", moved)
    err = refused("generate", tmp_path / "near", *words)
    assert f"the weight file {folder}/model.safetensors is gone; put it back, or compile" in err
    assert "--bundle" in err


@pytest.mark.parametrize(
    ("words", "says", "opens"),
    [
        (
            [],
            "irc opens it; rank0.onnx opens in plain ONNX Runtime if compiled with --bundle",
            False,
        ),
        (["--bundle"], "irc opens it, and plain ONNX Runtime opens rank0.onnx", True),
        (
            ["--bundle", "--mesh", "tp=2"],
            "irc runs its ranks; ONNX Runtime has no collectives",
            False,
        ),
    ],
)
def test_the_last_line_says_what_opens_a_model(
    checkpoint: Path, tmp_path: Path, words: list[str], says: str, opens: bool
) -> None:
    answer = works("compile", checkpoint, "-o", tmp_path / "out", *words)
    assert answer.out.splitlines()[-1].startswith(says)
    path = str(tmp_path / "out" / "rank0.onnx")
    if "--bundle" in words:
        onnx.checker.check_model(path, full_check=True)
    try:
        onnxruntime.InferenceSession(path)
    except Exception:
        assert not opens
    else:
        assert opens


def test_advice_about_a_checkpoint_as_output_names_another_folder(checkpoint: Path) -> None:
    assert "--bundle" not in refused("compile", checkpoint, "-o", checkpoint)


@pytest.mark.parametrize("source", [".", "module.irc"])
def test_a_bundle_is_a_source(checkpoint: Path, tmp_path: Path, source: str) -> None:
    words = ["--prompt", "the", "--max-new-tokens", "8"]
    bundle = tmp_path / "a bundle é"
    works("compile", checkpoint, "-o", bundle, "--bundle")
    text = works("generate", bundle, *words).out
    works("compile", bundle / source, "-o", tmp_path / "by reference")
    assert works("generate", tmp_path / "by reference", *words).out == text
    ends = json.loads((bundle / "config.json").read_text())["end_tokens"]
    assert json.loads((tmp_path / "by reference/config.json").read_text())["end_tokens"] == ends
    before = entries(bundle)
    err = refused("compile", bundle / source, "-o", bundle)
    assert "would be replaced, and with it the weights in" in err and "--bundle" in err
    assert entries(bundle) == before
    works("compile", bundle / source, "-o", bundle, "--bundle")
    assert works("generate", bundle, *words).out == text
