"""`irc compile --bundle`: an artifact that needs nothing else, and can be compiled again."""

import json
import shutil
from pathlib import Path

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
