"""`irc lint`: models and folders, groups of findings, exit status, JSON, list of rules."""

import re
from pathlib import Path

import pytest
from onnx import TensorProto

from irc.backends.tensorrt.lowering import table
from irc.backends.tensorrt.target import Target
from irc.ir.declare import REGISTRY
from tests.cli.runner import irc, refused, works
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


@pytest.mark.parametrize("command", ["compile", "lint", "show"])
def test_formats_of_others_are_named(tmp_path: Path, command: str) -> None:
    more = ["-o", tmp_path / "out"] if command == "compile" else []
    for name, says in [
        ("m.gguf", "a model of llama.cpp, which irc does not read; compile the checkpoint folder"),
        ("m.safetensors", "weights without a model; compile the checkpoint folder"),
        ("m.engine", "an engine; give the artifact folder"),
    ]:
        (tmp_path / name).write_bytes(b"GGUF\0\0\3\0")
        assert says in refused(command, tmp_path / name, *more)


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


def test_bad_input(clean: Path, tmp_path: Path) -> None:
    assert "cannot read" in refused("lint", tmp_path / "none.onnx")
    assert "there is no script" in refused("lint", tmp_path / "none.py")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty} holds no .onnx file" in refused("lint", empty)
    (empty / "config.json").write_text('{"model_type": "gpt2"}')
    assert "'gpt2'; it loads llama, mistral" in refused("lint", empty)
    assert "did you mean 'double'?" in refused("lint", clean, "--ignore", "doubles")
    assert "say which model" in refused("lint")
    clean.write_text("not a model")
    assert "is not an ONNX model" in refused("lint", clean)


def test_a_truncated_model_breaks_at_the_same_byte_for_lint_and_show(clean: Path) -> None:
    data = clean.read_bytes()
    for length in (len(data) // 2, len(data) - 1):
        clean.write_bytes(data[:length])
        err = refused("lint", clean)
        assert "or it is truncated: at byte " in err
        assert err == refused("show", clean)


@pytest.mark.parametrize("name", ["m.irc", "model.py", "model.py:build"])
def test_sources_are_not_linted(tmp_path: Path, name: str) -> None:
    (tmp_path / name.partition(":")[0]).write_text("module @m {}")
    assert refused("lint", tmp_path / name) == (
        f"error: {tmp_path / name} is no ONNX model; irc lint reads ONNX models and artifact "
        f"folders: irc compile {tmp_path / name} -o DIR, then irc lint DIR\n"
    )


def test_the_rules() -> None:
    assert "attention-valid-lengths" in works("lint", "--rules").out
    rows = works("lint", "--rules", "--json").json
    assert all(row["message"] and row["source"] for row in rows)


# ------------------------------------------------------------------ irc ops --target


def test_ops_for_a_target_prints_the_table_of_lowerings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Target] = []

    def rows(target: Target) -> list[table.Row]:
        asked.append(target)
        return [table.Row("add", "as ONNX", "it has it", "docs"), table.Row("mul", "Mul", "r", "s")]

    monkeypatch.setattr(table, "rows", rows)
    words = ("ops", "--target", "tensorrt-rtx-1.7/sm_89")
    head, first, *_ = works(*words).out.splitlines()
    assert head.split() == ["operation", "becomes", "reason", "source"]
    assert re.split("  +", first) == ["add", "as ONNX", "it has it", "docs"]
    assert asked == [Target("tensorrt-rtx", (1, 7), (89,))]
    expected = {"op": "mul", "choice": "Mul", "reason": "r", "source": "s"}
    assert works(*words, "mul", "--json").json == [expected]
    assert "| `add` | as ONNX | it has it | docs |" in works(*words, "--markdown").out
    assert "did you mean 'mul'?" in refused(*words, "mull")
    err = works("ops", "--target", "tensorrt-rtx-9.9/sm_89").err
    assert "irc knows no version after tensorrt-rtx-1.7; what holds there is assumed" in err
    assert works("ops", "--target", "tensorrt-rtx-1.7/sm_89").err == ""
    assert "no target 'tensorr'; did you mean" in refused("ops", "--target", "tensorr")
    assert "no engine is for sm_90" in refused("ops", "--target", "tensorrt-rtx-1.7/sm_90")


def test_ops_for_a_target_has_every_operation() -> None:
    found = works("ops", "--target", "tensorrt-rtx-1.7/sm_89", "--json").json
    assert {each["op"] for each in found} == set(REGISTRY)
    assert all(each["choice"] and each["reason"] and each["source"] for each in found)


def test_ops_for_a_target_names_missing_dtypes() -> None:
    old, new = (works("ops", "--target", f"tensorrt-rtx-1.7/sm_{each}").out for each in (75, 89))
    assert re.search(r"^f64 +is in f64", old, re.MULTILINE)
    assert re.search(r"^bf16 +is in bf16, which needs sm_80", old, re.MULTILINE)
    assert "needs sm_80" not in new
