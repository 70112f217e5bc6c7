"""Findings reach the user: of `irc lint`, of `irc compile`, and of `irc compile --dry-run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from irc.backends.tensorrt.lint import RULES, Finding, Rule, lint_file
from irc.backends.tensorrt.lint.grouping import SHOWN, grouped, notes
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from tests.cli.runner import works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.tensorrt.lint_models import constant, model, node
from tests.tensorrt.test_lint import CASES

RTX = Target.parse("tensorrt-rtx-1.7/sm_80+sm_89")
SILENT = "tensorrt-11.2/sm_120"  # whose native caches come with a warning


def warned(node: str, message: str = "m; c") -> Finding:
    return Finding("some-rule", "warning", message, node, f"scope/{node}", "net.py:1")


def test_findings_of_one_sentence_are_one_group() -> None:
    findings = [warned(f"n{i}") for i in range(SHOWN + 2)] + [warned("n", "other; c")]
    first, second = grouped(findings)
    assert (first.severity, first.sentence) == ("warning", "[some-rule] m; c")
    assert first.lines()[0] == "net.py:1  scope/n0"
    assert first.lines()[-1] == "and 2 more; irc lint --all prints them"
    assert len(first.lines(all_places=True)) == SHOWN + 2
    assert second.lines() == ["net.py:1  scope/n"]


def test_what_holds_of_several_models_is_said_once() -> None:
    same = {f"rank{i}.onnx": [warned("a")] for i in range(4)}
    assert notes(same | {"other.onnx": [], "last.onnx": [warned("b")]}) == [
        "rank0.onnx, rank1.onnx and 2 more: warning [some-rule] m; c\n    net.py:1  scope/a",
        "last.onnx: warning [some-rule] m; c\n    net.py:1  scope/b",
    ]


@pytest.mark.parametrize("dry", [False, True])
def test_compiling_tells_the_warnings(dry: bool, tmp_path: Path) -> None:
    tiny = ROOT / "examples" / "tiny_llama"
    words = ("compile", ROOT / "examples" / "llama.py", "--checkpoint", tiny)
    words += ("--backend", "tensorrt", "--no-build", "--target", SILENT)
    said = works(*words, *(["--dry-run"] if dry else ["-o", tmp_path / "out"])).out
    assert "rank0.onnx: warning [native-cache-builds] native caches failed" in said
    assert "\n    llama.py:33  model.layers.0.self_attn/cache_update\n" in said
    assert "and 3 more; irc lint --all prints them" in said
    if not dry:
        linted = works("lint", tmp_path / "out").out
        assert "rank0.onnx: 8 warnings\n  warning [native-cache-builds] native caches" in linted


def test_a_model_without_findings_is_said_to_have_none(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model(node("Relu", "x"), "x:f16[4,8]").SerializeToString())
    said = works("lint", path, "--target", str(RTX)).out
    assert said == f"{path}: no findings for {RTX}\n"


def test_a_bug_in_a_rule_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: object, target: object) -> list[tuple[None, str]]:
        raise KeyError("oops")

    monkeypatch.setitem(RULES, "broken", Rule("broken", "It is broken.", "ONNX", broken))
    path = tmp_path / "m.onnx"
    path.write_bytes(model(node("Relu", "x"), "x:f16[4,8]").SerializeToString())
    with pytest.raises(KeyError, match="oops"):
        lint_file(path, RTX)


def test_numbers_that_are_not_there_are_a_sentence(tmp_path: Path) -> None:
    weight = constant("k:i64[1]")
    weight.ClearField("int64_data")
    weight.raw_data = b"abc"
    proto = model(node("TopK", "x k", "y i"), "x:f16[4,8]", "y:f16[4,1]", [weight])
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(Error, match=r"the tensor 'k' is damaged \(.*\); export it again") as caught:
        lint_file(path, RTX)
    assert f"in {path}" in str(caught.value)


def test_damaged_files_are_linted_or_refused(tmp_path: Path) -> None:
    """Whatever a byte becomes, the answer is a list or a sentence."""
    rng, path = fresh(83), tmp_path / "m.onnx"
    models = [case.bad.SerializeToString() for case in CASES if case.bad.ByteSize() < 20000]
    for _ in range(400):
        data = bytearray(models[int(rng.integers(len(models)))])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path.write_bytes(bytes(data))
        try:
            lint_file(path, RTX)
        except Error:
            continue
