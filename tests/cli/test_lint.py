"""`irc lint`: models and folders, groups of findings, exit status, JSON, list of rules."""

from pathlib import Path

import pytest
from onnx import TensorProto

from tests.cli.runner import irc, works
from tests.tensorrt.graphs import model, node

ONE = "x:f16[4,8]"


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    path = tmp_path / "a_clean.onnx"
    path.write_bytes(model(node("Relu", "x"), ONE).SerializeToString())
    return path


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A model of seven operators of another domain that are ONNX's by name, and a warning."""
    path = tmp_path / "b_faulty.onnx"
    body = [node("Relu", "x", f"c{i}", "mine") for i in range(7)]
    for i, relu in enumerate(body):
        relu.name = f"model/mine{i}/Relu.c{i}"
        relu.metadata_props.add(key="loc", value=f"net.py:{i + 3}")
    body += [node("Cast", "x", "d", to=TensorProto.DOUBLE), node("Relu", "x")]
    path.write_bytes(model(body, ONE).SerializeToString())
    return path


def test_findings_are_grouped_and_an_error_is_exit_status_1(faulty: Path) -> None:
    answer = irc("lint", faulty)
    assert answer.status == 1
    first, error, *places = answer.out.splitlines()
    assert first == f"{faulty}: 7 errors, 1 warning"
    assert error.startswith("  error [builtin-name] the parser ignores domains and reads this")
    assert places[0] == "    net.py:3  model/mine0"
    assert places[5] == "    and 2 more; irc lint --all prints them"
    assert places[6].startswith("  warning [double] the result is float64, which silently")
    assert "model/mine6" in irc("lint", faulty, "--all").out


def test_warnings_alone_are_no_failure(faulty: Path) -> None:
    answer = works("lint", faulty, "--ignore", "builtin-name")
    assert answer.out.startswith(f"{faulty}: 1 warning\n")


def test_every_model_of_a_folder_is_linted(clean: Path, faulty: Path, tmp_path: Path) -> None:
    answer = irc("lint", tmp_path)
    assert answer.status == 1
    assert f"{clean}: no findings\n{faulty}: 7 errors" in answer.out


def test_a_model_that_irc_does_not_read_gets_a_note(clean: Path, tmp_path: Path) -> None:
    path = tmp_path / "nonzero.onnx"
    path.write_bytes(model(node("NonZero", "x"), ONE, "y:i64[2,N]").SerializeToString())
    assert "irc compile does not" not in works("lint", clean).out
    assert "note: irc compile does not read this file: " in irc("lint", path).out
    assert "NonZero" in irc("lint", path, "--json").json["refused_by_irc"][str(path)]


def test_json(clean: Path, faulty: Path, tmp_path: Path) -> None:
    answer = irc("lint", tmp_path, "--json")
    assert answer.status == 1
    found = answer.json
    assert found["ok"] is False
    assert len(found["findings"]) == 8
    assert found["findings"][0] == {
        "file": str(faulty),
        "rule": "builtin-name",
        "severity": "error",
        "message": "the parser ignores domains and reads this node as the Relu of ONNX; rename it",
        "node": "model/mine0/Relu.c0",
        "op": "model/mine0",
        "source": "net.py:3",
    }
    assert works("lint", clean, "--json").json["ok"] is True


def test_an_artifact_for_onnxruntime_is_linted(artifact: Path) -> None:
    answer = irc("lint", artifact)
    assert answer.status == 1
    assert "[attention-valid-lengths] the parser drops nonpad_kv_seqlen" in answer.out


# ------------------------------------------------------------------ irc ops --target
