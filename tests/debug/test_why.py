"""`irc why` against facts known from the script: examples/llama.py over two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.runner import refused, works
from tests.layout import ROOT

LLAMA = ROOT / "examples" / "llama.py"
LINES = LLAMA.read_text().splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example compiled for two ranks."""
    folder = tmp_path_factory.mktemp("why") / "llama"
    options = ("--random-weights", "1", "--mesh", "tp=2", "-o", folder)
    works("compile", LLAMA, *options)
    return folder


def name_of(place: Path, pattern: str) -> str:
    """The name of the only value whose line matches."""
    (name,) = re.findall(
        rf"^    (%[\w.]+) = {pattern}.*$", (place / "module.irc").read_text(), re.M
    )
    return name


def rows(place: Path, name: str) -> tuple[dict[str, str], list[str]]:
    """(how by pass, the operations before the passes) of a value."""
    facts = works("why", place, name, "--json").json
    changes = {row["pass"].partition("{")[0]: row["how"] for row in facts["changes"]}
    return changes, [row["text"].partition(" = ")[2].partition(" ")[0] for row in facts["input"]]


def test_a_gated_mlp_comes_from_four_operations(place: Path) -> None:
    name = name_of(place, "gated_mlp .*model.layers.1.mlp.gate")
    changes, ops = rows(place, name)
    assert changes == {"localize": "rebuilt", "fuse-gated-mlp": "rewritten"}
    assert ops == ["linear", "silu", "linear", "mul"]
    out = works("why", place, name).out
    assert re.search(r"rewrite 2, rule gated_mlp \(.*\.py:\d+\), at llama.py:\d+ in .*1.mlp", out)
    line = next(n for n, text in enumerate(LINES, 1) if "self.mlp(self.post" in text)
    assert f"        llama.py:{line} in model.layers.1.mlp.up_proj\n" in out and out.startswith(
        name
    )


@pytest.mark.parametrize("projection", ["self_attn.o_proj", "mlp.down_proj"])
def test_an_all_reduce_comes_from_the_row_parallel_linear(place: Path, projection: str) -> None:
    scope = f"model.layers.1.{projection}"
    name = name_of(place, rf'all_reduce .*"{re.escape(scope)}"')
    changes, ops = rows(place, name.removeprefix("%"))
    assert changes == {"localize": "rebuilt", "shard": "new"} and ops == ["linear"]
    assert f" in {scope}" in works("why", place, name).out.splitlines()[-1]


def test_a_weight_is_followed_through_its_steps(place: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    facts = works("why", place, f"@{name}", "--json").json
    assert [row["pass"].partition("{")[0] for row in facts["changes"]] == ["localize", "shard"]
    assert ".shard(1, tp)" in facts["text"] and "192@tp]" in facts["changes"][1]["text"]
    (first,) = facts["input"]
    assert first["value"] == f"@{name}" and "@tp" not in first["text"]
    assert works("why", place, name).out == works("why", place, f"@{name}").out


def test_merged_weights_come_from_all_of_them(tmp_path: Path) -> None:
    options = ("--random-weights", "1", "--pipeline", "fuse-qkv", "-o", tmp_path / "a")
    works("compile", LLAMA, *options)
    text = (tmp_path / "a" / "module.irc").read_text()
    name = re.findall(r"weight (@\S+) : .*concat\(.*layers.1.self_attn.q_proj", text)[0]
    (change, *_), first = (
        works("why", tmp_path / "a", name, "--json").json[k] for k in ("changes", "input")
    )
    assert change["how"] == "new"
    assert [row["value"].split(".")[-2] for row in first] == ["q_proj", "k_proj", "v_proj"]


def test_what_is_unknown(place: Path, tmp_path: Path) -> None:
    assert "no value 'mlpp'; did you mean" in refused("why", place, "mlpp")
    assert "does not exist" in refused("why", tmp_path / "none", "x")
    assert "not an artifact" in refused("why", tmp_path, "x")
    argument = works("why", place, "input_ids").out
    assert argument.startswith("argument %input_ids") and "rebuilt" in argument
