"""Comparisons of artifacts, files and backends, causes of differences, and what is not compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import irc
from irc.compare import compare
from irc.compare.measure import measure
from irc.driver.sources import find_source
from irc.errors import Error
from irc.ops import AllReduce
from tests.cli.conftest import MODULE
from tests.cli.runner import irc as command
from tests.cli.runner import refused, works
from tests.fresh import fresh
from tests.tiny_checkpoint import write_checkpoint

LAYER = "model.layers.1.mlp"
OTHER = MODULE.replace("layers", "blocks").replace("(y: f32", "(other: f32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers."""
    return write_checkpoint(tmp_path_factory.mktemp("folder") / "llama", num_hidden_layers=4)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"mesh": "tp=2"}, ["rounding of f32"]),
        ({"mesh": "pp=2"}, ["rounding of f32"]),
        ({"mesh": "tp=2", "backend": "reference", "dtype": "bf16"}, ["rounding of bf16"]),
        (
            {"quantize": "w4a16", "group": 16},
            ["rounding of f32", "as expected of int4", "as expected of int8"],
        ),
    ],
    ids=str,
)
def test_an_artifact_agrees_with_transformers(
    options: dict[str, Any], names: list[str], folder: Path, tmp_path: Path
) -> None:
    irc.compile(folder, tmp_path / "built", **options)
    found = compare(tmp_path / "built", folder, seed=int(fresh().integers(1000)))
    assert found.ok, found.first
    assert "in transformers" in found.b
    assert len(found.values) >= 30
    assert {row.cause for row in found.values} - {"equal"} == {*names}
    assert {row.line.partition(":")[0] for row in found.values} == {"decoder.py"}


def test_a_fault_stands_out_among_ranks_and_int4(folder: Path, tmp_path: Path) -> None:
    irc.compile(folder, tmp_path / "f32", backend="reference")
    options: dict[str, Any] = {"quantize": "w4a16", "group": 16, "mesh": "tp=2"}
    built = irc.compile(folder, tmp_path / "w4", backend="reference", **options).folder
    fine = compare(built, tmp_path / "f32")
    assert fine.ok, fine.first
    assert "another shape" not in fine.left_out
    text = (built / "module.irc").read_text()
    used = " = dequantize @{0}.down_proj.weight, @{0}.down_proj.scale"
    wrong = text.replace(used.format(LAYER), used.format("model.layers.2.mlp"))
    assert wrong != text
    (built / "wrong.irc").write_text(wrong)
    found = compare(built / "wrong.irc", tmp_path / "f32")
    assert found.first is not None
    assert found.first.cause == "other numbers"
    assert [row.label for row in found.values if not row.ok] == [f"{LAYER}.down_proj"]
    assert not compare(built / "wrong.irc", tmp_path / "f32", accumulate=True).ok
    inside = compare(built / "wrong.irc", tmp_path / "f32", scope="model.layers.0")
    assert inside.ok
    assert inside.total < found.total
    assert "have no partner" in inside.left_out


def test_dumps_onnx_files_and_backends(folder: Path, tmp_path: Path) -> None:
    irc.compile(folder, tmp_path / "built", bundle=True)
    words = ["--passes", "inline, canonicalize, fuse-gated-mlp", "--dump-dir", tmp_path / "dumps"]
    works("opt", tmp_path / "built" / "module.irc", *words)
    dumps = sorted((tmp_path / "dumps").glob("*.irc"))
    for a, b in [
        (dumps[0], dumps[-1]),
        (tmp_path / "built", tmp_path / "built" / "rank0.onnx"),
        (tmp_path / "built", None),
    ]:
        found = compare(a, b)
        assert found.ok, found.first
        scopes = {row.scope for row in found.values}
        assert {f"model.layers.{i}.mlp.down_proj" for i in range(4)} <= scopes


def test_two_programs_of_backends_name_where_the_error_grows(folder: Path, tmp_path: Path) -> None:
    irc.compile(folder, tmp_path / "good")
    text = (tmp_path / "good" / "module.irc").read_text()
    names = [f"@{LAYER}.{name}_proj.weight" for name in ("gate", "up")]
    swapped = text.replace(", ".join(names) + " ", ", ".join(reversed(names)) + " ")
    assert swapped != text
    (tmp_path / "bad.irc").write_text(swapped)
    found = compare(tmp_path / "bad.irc", tmp_path / "good", backend="onnx", against="onnx")
    assert not found.equal_inputs
    assert found.first is not None
    assert found.first.scope == f"{LAYER}.down_proj"


def test_products_with_what_is_around_them_have_no_partner(folder: Path, tmp_path: Path) -> None:
    irc.compile(folder, tmp_path / "apart")
    irc.compile(folder, tmp_path / "joined", pipeline="default, fuse-linear-epilogue")
    found = compare(tmp_path / "apart", tmp_path / "joined", against="reference")
    assert found.ok and len(found.values) > 20
    assert not any(row.scope.endswith("o_proj") for row in found.values)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.irc"
    good.write_text(MODULE)
    answer = works("compare", good, good)
    assert "\n5 values: equal\nno divergence in 5 of 5 values\n" in answer.out
    (tmp_path / "bad.irc").write_text(MODULE.replace("%again = mul %x, %x", "%again = sub %x, %x"))
    answer = command("compare", tmp_path / "bad.irc", good, "--random", "7")
    assert answer.status == 1
    wanted = (
        "first divergence: layers.0.mlp %again (model.py:8): correlation 0, relative L2 1, zeros"
    )
    assert wanted in answer.out
    assert "irc show" in answer.out
    facts = command("compare", tmp_path / "bad.irc", good, "--json", "--random", "7").json
    assert facts["first"] in facts["values"]
    assert (facts["first"]["line"], facts["ok"]) == ("model.py:8", False)
    assert works("compare", tmp_path / "bad.irc", good, "--tolerance", "1e9", "--all")
    x = np.full((2, 4), np.nan, np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    answer = works("compare", good, good, "--inputs", tmp_path / "in.npz", "--json")
    assert {row["cause"] for row in answer.json["values"]} == {"equal, NaN on both sides"}
    assert answer.json["not_finite"] == answer.json["values"][0]
    answer = works("compare", good, good, "--inputs", tmp_path / "in.npz")
    assert "of 5 values; NaN on both sides, first in layers.0.norm (model.py:7)" in answer.out
    (tmp_path / "bad.irc").write_text(MODULE.replace("layers.0.mlp", r"layers.0.\u001b[31mmlp"))
    answer = works("compare", tmp_path / "bad.irc", tmp_path / "bad.irc", "--all", "--scope", "")
    assert r"layers.0.\x1b[31mmlp" in answer.out
    assert "\x1b" not in answer.out


def with_last(op: str, columns: int) -> str:
    """MODULE with one more operation on its result, which has no location."""
    text = MODULE.replace("(y: f32[B, 8]", f"(y: f32[B, {columns}]")
    return text.replace("return %y", f"%z = {op} : f32[B, {columns}]\n    return %z")


NEGATED = with_last("neg %y", 8)
PADDED = with_last("pad %y {before=[0, 0], after=[0, 2]}", 10)
BEFORE = with_last("pad %y {before=[0, 2], after=[0, 0]}", 10)
BARE = "\n".join(line.split(" loc(")[0] for line in MODULE.splitlines())


@pytest.mark.parametrize(
    ("a", "b", "cause", "left_out"),
    [
        (NEGATED, MODULE, "scale or sign: -1 times the second", "1 value of A and 0 of B"),
        (MODULE, NEGATED, "scale or sign: -1 times the second", "0 values of A and 1 of B"),
        (BARE, MODULE, "equal", "4 values of A and 4 of B"),
        (PADDED, MODULE, "equal", "1 value of A and 0 of B"),
        (MODULE, PADDED, "equal", "0 values of A and 1 of B"),
        (MODULE, BEFORE, "", "1 of another shape: result y [2, 8] and [2, 10]"),
    ],
    ids=["negated", "negated B", "no scopes", "padded", "padded B", "not at the end"],
)
def test_results_without_a_scope_are_compared(a: str, b: str, cause: str, left_out: str) -> None:
    found = compare(irc.parse(a), irc.parse(b))
    assert left_out in found.left_out
    assert [row.cause for row in found.values if row.label == "result y"] == [cause] * bool(cause)
    assert found.ok == (not cause.startswith("scale"))


@pytest.mark.oracle
def test_logits_negated_after_lm_head(folder: Path, tmp_path: Path) -> None:
    irc.compile(folder, tmp_path / "built", backend="reference")
    text = (tmp_path / "built" / "input.irc").read_text()
    negated = text.replace("return %lm_head", "%z = neg %lm_head : f32[B, T, 300]\n    return %z")
    (tmp_path / "bad.irc").write_text(negated)
    assert "%z" in negated
    for other in (folder, tmp_path / "built"):
        found = compare(tmp_path / "bad.irc", other)
        assert found.first is not None
        assert found.first.label == "result logits"
        assert [row for row in found.values if not row.ok] == [found.first]


@pytest.mark.parametrize("source", ["A", "B"])
def test_ranks_that_differ(folder: Path, tmp_path: Path, source: str) -> None:
    irc.compile(folder, tmp_path / "tp2", mesh="tp=2", backend="reference")
    whole = AllReduce.combine

    def wrong(self: AllReduce, shards: list[Any]) -> list[Any]:
        first, *others = whole(self, shards)
        return [first, *(2 * other for other in others)]

    places = (tmp_path / "tp2", folder) if source == "A" else (folder, tmp_path / "tp2")
    with mock.patch.object(AllReduce, "combine", wrong):
        found = compare(*places, reference="irc")
    assert found.first is not None
    assert (found.first.cause, found.first.relative_l2) == ("ranks differ", pytest.approx(1.0))
    assert found.first.scope == "model.embed_tokens"


def test_what_cannot_be_compared(folder: Path, tmp_path: Path) -> None:
    texts = {
        "good": MODULE,
        "other": OTHER.replace('"head"', '"tail"'),
        "empty": "module @m {\n}\n",
        "wide": MODULE.replace("4]", "6]").replace("8, 4", "8, 6").replace("B, 8]", "B, 8]"),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.irc").write_text(text)
    files = {name: tmp_path / f"{name}.irc" for name in (*texts, "missing")}
    np.savez(tmp_path / "in.npz", y=np.zeros(3))
    np.savez(tmp_path / "empty.npz", x=np.zeros((0, 4), np.float32))
    for words, message in [
        ((files["good"], files["other"]), "have no scope and no result in common"),
        ((files["empty"], files["good"]), "has no function"),
        ((files["good"], files["missing"]), "there is no"),
        ((files["good"],), "would be compared with itself"),
        ((files["good"], files["good"], "--scope", "layers.0.mpl"), "did you mean"),
        ((files["good"], files["good"], "--backend", "onxx"), "did you mean 'onnx'"),
        ((files["good"], files["good"], "--reference", "transformers"), "a checkpoint folder"),
        ((files["good"], files["good"], "--inputs", tmp_path / "in.npz"), "no input 'y'"),
        ((files["good"], files["good"], "--inputs", tmp_path / "empty.npz"), "has no elements"),
        ((files["good"], files["wide"]), "must be"),
    ]:
        assert message in refused("compare", *words), words
    with pytest.raises(Error, match="would be compared with itself"):
        compare(find_source(files["good"]).module)


def test_causes() -> None:
    rng = fresh()
    b = rng.standard_normal((7, 12))
    turned = rng.permutation(12)
    for a, cause in [
        (b, "equal"),
        (-b, "scale or sign: -1 times the second"),
        (b * np.where(np.arange(12) == 5, -1, 1), "scale or sign: a factor per element"),
        (b + rng.standard_normal(12), "offset"),
        (b[:, np.roll(turned, 1)], "layout: the last dimension"),
        (np.roll(b, 1, 0), "layout: rows"),
        (b.reshape(12, 7).T, "layout: the same numbers"),
        (b * 0, "zeros in the first"),
        (rng.standard_normal((7, 12)), "other numbers"),
        (np.where(b == b.max(), np.nan, b), "NaN or infinity in the first"),
    ]:
        assert measure(a, b).cause.startswith(cause), cause
    noise = rng.standard_normal(b.shape) * 0.1
    assert measure(b + noise, b).relative_l2 == pytest.approx(
        float(np.linalg.norm(noise) / np.linalg.norm(b))
    )
    assert measure(-b + noise, b, 0.35).cause.startswith("scale or sign")


def test_ranks_that_are_processes_are_refused(folder: Path, tmp_path: Path) -> None:
    irc.compile(folder, tmp_path / "built", backend="cuda", mesh="tp=2")
    with pytest.raises(irc.Error, match=r"expected one rank, found 2: .*give --backend reference"):
        compare(tmp_path / "built")
