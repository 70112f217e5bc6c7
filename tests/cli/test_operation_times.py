"""`irc bench --per-op` and `--trace`: rows, sums, floors, and the form of Perfetto."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.analysis.places import general
from irc.backends.onnx.backend import OnnxBackend
from irc.backends.onnxruntime.profile import value_of
from irc.driver.timing import time_operations
from tests.cli.runner import refused, works

KEYS = [
    *("scope", "operation", "layers", "calls", "us", "share", "nbytes", "floor_us"),
    *("kernels", "values"),
]
LINE = re.compile(r"^ +%.* = (\w+) .* loc\(\S+ \"([^\"]+)\"\)$", re.MULTILINE)
SLOW = """\
module @m dims(B=64:256:256) {
  weight @w : f32[2048, 1024] = random("w", 1, 0.1)
  func @forward(%x: f32[B, 1024]) -> (y: f32[B, 2048]) {
    %a = neg %x : f32[B, 1024] loc("model.py":7 "first")
    %b = add %a, %x : f32[B, 1024] loc("model.py":9 "layers.0")
    %y = linear %b, @w : f32[B, 2048] loc("model.py":8 "layers.0.product")
    return %y
  }
}
"""


def lines_of(artifact: Path) -> Counter[tuple[str, str]]:
    """The operations in the text of an artifact by their general scopes and their names."""
    text = (artifact / "module.irc").read_text()
    return Counter((general(scope), name) for name, scope in LINE.findall(text))


@pytest.fixture(scope="module")
def stages(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "out"
    works("compile", checkpoint, "-o", folder, "--mesh", "pp=2")
    return folder


@pytest.mark.parametrize("mesh", ["artifact", "two_ranks", "stages"])
@pytest.mark.parametrize("backend", ["onnx", "reference"])
def test_rows_are_the_operations_of_the_text(
    mesh: str, backend: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(mesh)
    words = ("--per-op", "--runs", "2", "--dims", "B=2,S=6", "--backend", backend, "--json")
    found = works("bench", folder, *words).json["phases"]
    assert [(p["phase"], p["per_run"]) for p in found] == [("prefill", 12), ("decode", 2)]
    expected = lines_of(folder)
    for phase in found:
        rows = phase["operations"]
        assert all(list(row) == KEYS for row in rows)
        assert [row["us"] for row in rows] == sorted((r["us"] for r in rows), reverse=True)
        assert sum(row["us"] for row in rows) == pytest.approx(phase["us"] - phase["rest_us"])
        assert 0 <= phase["rest_us"] < phase["us"]
        assert sum(row["share"] for row in rows) <= 1
        assert all(row["floor_us"] <= row["us"] * 1.0001 for row in rows)
        timed = {(row["scope"], row["operation"]): row for row in rows if row["scope"]}
        assert {*timed} <= {*expected}
        for key in expected:
            if key[1] in ("linear", "attention", "all_reduce", "rms_norm"):
                row = timed[key]
                assert row["calls"] >= expected[key]
                if mesh != "stages":  # of which each names values of its own
                    assert len({*row["values"]} & _names(row)) == expected[key]
                assert row["layers"] == (2 if "*" in key[0] else 1)
        head = timed["lm_head", "linear"]
        assert head["nbytes"] >= 4 * 32 * 300 / (2 if mesh == "two_ranks" else 1)


def _names(row: dict[str, Any]) -> set[str]:
    """The values that are results of operations, not parts of one."""
    return {value for value in row["values"] if "/" not in value}


@pytest.mark.parametrize("backend", ["onnx", "reference"])
def test_the_slowest_operation_is_first(backend: str, tmp_path: Path) -> None:
    (tmp_path / "m.irc").write_text(SLOW)
    works("compile", tmp_path / "m.irc", "-o", tmp_path / "out", "--backend", backend)
    words = ("--per-op", "--runs", "3", "--dims", "B=128")
    answer = works("bench", tmp_path / "out", *words, "--json").json["phases"][0]
    (first, *rest) = answer["operations"]
    assert (first["scope"], first["operation"]) == ("layers.0.product", "linear")
    assert first["values"] == ["%y"]
    assert first["nbytes"] == 4 * (2048 * 1024 + 128 * (1024 + 2048))
    assert answer["per_run"] == 128 and {r["scope"] for r in rest} <= {"first", "layers.0"}
    text = works("bench", tmp_path / "out", *words).out
    assert re.search(
        r"^layers\.0\.product +linear +1 +[\d,.]+ +[\d.]+% +10\.0 MB +\d+%$", text, re.M
    )
    (times,) = time_operations(str(tmp_path / "out"), {"x": np.ones((64, 1024), "f")}, runs=2)
    assert times.phase.sizes == {"B": 64} and times.operations[0].operation == "linear"
    (times,) = time_operations(str(tmp_path / "m.irc"), runs=1, backend="reference")
    assert times.phase.sizes == {"B": 256} and times.operations[0].scope == "layers.0.product"


def test_normal_runs_at_other_sizes(artifact: Path) -> None:
    found = works("bench", artifact, "--runs", "2", "--dims", "B=3,S=5,C=40", "--json").json
    assert [(p["phase"], p["per_run"]) for p in found["phases"]] == [("prefill", 15), ("decode", 3)]
    assert "operations" not in found["phases"][0]
    (phase,) = works("bench", artifact, "--runs", "2", "--dims", "S=1,C=1", "--json").json["phases"]
    assert phase["phase"] == "prefill"  # no room for another token


@pytest.mark.parametrize(("mesh", "count"), [("two_ranks", 2), ("stages", 2), ("artifact", 1)])
def test_traces_have_the_form_of_perfetto(
    mesh: str, count: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The Trace Event Format: complete events (X) have ts and dur in microseconds, metadata (M)
    names processes and threads; slices of a thread nest."""
    file = tmp_path / "trace.json"
    works("bench", request.getfixturevalue(mesh), "--runs", "1", "--trace", file)
    document = json.loads(file.read_text())
    entries = document["traceEvents"]
    assert {entry["ph"] for entry in entries} == {"X", "M"} and document["displayTimeUnit"] == "ns"
    lanes: dict[tuple[int, str], list[dict[str, Any]]] = {}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    for entry in entries:
        if entry["ph"] == "X":
            assert entry["ts"] >= 0 and entry["dur"] >= 0 and isinstance(entry["name"], str)
            lanes.setdefault((entry["pid"], names[entry["pid"], entry["tid"]]), []).append(entry)
    wanted = {(rank, lane) for rank in range(count) for lane in ("expected", "measured")}
    assert {*lanes} == wanted | {(0, "phases")}
    assert [e["name"] for e in lanes[0, "phases"]] == ["prefill", "decode"]
    for lane in wanted:
        for before, after in pairwise(lanes[lane]):
            assert before["ts"] + before["dur"] <= after["ts"] + 20  # of integers, and two clocks
        scopes = {entry["args"]["scope"] for entry in lanes[lane]}
        assert any(scope.startswith("model.layers.") for scope in scopes)
    assert any(entry["name"] == "linear" for entry in lanes[0, "expected"])
    if mesh == "stages":
        parts = [{e["args"]["scope"] for e in lanes[rank, "measured"]} for rank in (0, 1)]
        assert "model.layers.0.mlp" in parts[0] and "model.layers.1.mlp" in parts[1]
        assert not any(scope.startswith("model.layers.") for scope in parts[0] & parts[1])


@pytest.mark.parametrize(
    ("node", "wanted"),
    [
        ("model.layers.0.mlp/linear/Gemm.3/Gemm.1", ("Gemm", "%3/Gemm.1")),
        (
            "/GroupQueryAttention.mixed.1/Transpose.1",
            ("GroupQueryAttention", "%mixed.1/Transpose.1"),
        ),
        ("linear/Gemm.y", ("Gemm", "%y")),
        ("Fused", ("Fused", "")),
    ],
)
def test_nodes_name_their_values(node: str, wanted: tuple[str, str]) -> None:
    assert value_of(node) == wanted


def test_a_backend_that_cannot_record_says_so(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxBackend, "records", False)
    assert "onnx does not time operations" in refused("bench", artifact, "--per-op")
