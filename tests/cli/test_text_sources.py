"""What `irc show` and `irc opt` read: scripts, and texts with weights beside them."""

from pathlib import Path

import numpy as np
import pytest

from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.models.golden import write_safetensors

BESIDE = """\
module @m {
  file @w = "w.safetensors"
  weight @a : f32[2, 4] = @w["a"]
  func @forward(%x: f32[3, 4]) -> (y: f32[3, 2]) {
    %y = linear %x, @a : f32[3, 2]
    return %y
  }
}
"""


# ------------------------------------------------------------------ scripts


def test_show_takes_a_script_without_a_checkpoint(script: Path) -> None:
    shown = works("show", script).out
    assert 'weight @head.weight : f32[8, 4] = unbound("head.weight")' in shown
    assert works("show", f"{script}:build").out == shown
    assert works("opt", script).out == shown
    assert works("opt", stdin=shown).out == shown
    assert "f32[3, 4]" in works("show", f"{script}:other").out
    assert 'loc("tiny.py":11 "head")' in works("show", script, "--locs").out
    assert works("show", script, "--stats", "--json").json["name"] == "tiny"


def test_opt_runs_passes_over_a_script(script: Path) -> None:
    assert works("opt", script).out.count("= linear ") == 2
    assert works("opt", script, "--passes", "cse").out.count("= linear ") == 1


@pytest.mark.parametrize("command", ["show", "opt"])
def test_options_of_a_script(script: Path, command: str) -> None:
    assert "f32[5, 4]" in works(command, script, "--set", "width=5").out
    assert "bf16[8, 4]" in works(command, script, "--dtype", "bf16").out
    assert "did you mean 'width'?" in refused(command, script, "--set", "with=5")
    tiny = ROOT / "examples" / "tiny_llama"
    text = works(command, ROOT / "examples" / "llama.py", "--checkpoint", tiny).out
    assert str(tiny / "model.safetensors") in text


def test_diff_takes_scripts(script: Path) -> None:
    assert works("diff", script, script).out == ""


# ------------------------------------------------------------------ weights beside a text


def test_numerics_are_checked_with_the_weights_beside_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "away").mkdir()
    text = tmp_path / "home" / "m.irc"
    text.write_text(BESIDE)
    write_safetensors(
        tmp_path / "home" / "w.safetensors",
        {"a": fresh().standard_normal((2, 4)).astype(np.float32)},
    )
    words = ("--passes", "expand, fold, dce", "--check-numerics")
    monkeypatch.chdir(tmp_path / "away")
    assert works("opt", text, *words).out == BESIDE
    assert works("opt", Path("..") / "home" / "m.irc", *words).out == BESIDE
    assert "cannot read" in refused("opt", *words, stdin=BESIDE)
    monkeypatch.chdir(tmp_path / "home")
    assert works("opt", "m.irc", *words).out == BESIDE
    assert works("opt", *words, stdin=BESIDE).out == BESIDE


def test_numerics_are_checked_with_the_weights_of_an_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "m.irc"
    text.write_text(BESIDE)
    write_safetensors(
        tmp_path / "w.safetensors", {"a": fresh().standard_normal((2, 4)).astype(np.float32)}
    )
    works("compile", text, "-o", tmp_path / "made", "--bundle")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    for place in ("../made", "../made/module.irc", "../made/rank0.onnx"):
        works("opt", place, "--passes", "dce", "--check-numerics")
