"""`irc quality`: tables, JSON, and refusals."""

from pathlib import Path

import pytest

from tests.cli.runner import refused, works
from tests.layout import ROOT

TINY = ROOT / "examples" / "tiny_llama"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "tiny"
    works("compile", TINY, "-o", folder)
    return folder


def test_a_model_against_itself(artifact: Path) -> None:
    text = ROOT / "README.md"
    words = ["--text", text, "--tokens", "300", "--length", "100"]
    found = works("quality", artifact, "--against", artifact, *words, "--json").json
    assert found["tokens"] == 297
    assert found["perplexity"] == found["reference_perplexity"] > 1
    assert (found["increase"], found["kl"], found["top1"]) == (0.0, 0.0, 1.0)
    shown = works("quality", artifact, "--against", artifact, *words).out
    assert "same likeliest token" in shown and "100.00%" in shown


def test_a_model_alone_on_the_help_of_python(artifact: Path) -> None:
    shown = works("quality", artifact, "--tokens", "200").out
    assert "perplexity" in shown and "KL" not in shown


def test_refusals(artifact: Path, tmp_path: Path) -> None:
    assert "cannot read" in refused("quality", artifact, "--text", tmp_path / "none.txt")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe")
    assert "not text in UTF-8" in refused("quality", artifact, "--text", binary)
    text = refused("quality", artifact, "--length", "600")
    assert "a call takes 512 tokens at most; give --length 512 or less" in text
    binary.write_bytes(b"")
    assert "the text has 0 tokens" in refused("quality", artifact, "--text", binary)
