"""Plugins of a user's own, from a file on the command line to a layer of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irc
from irc.backends.tensorrt.lint import lint
from irc.backends.tensorrt.lint.inference import skeleton, types_of
from irc.backends.tensorrt.lowering.table import CHOICES, Choices, lowerings, rows
from irc.backends.tensorrt.plugins import (
    SPECS,
    Field,
    attributes_of,
    evaluate,
    find,
    load,
    register_schemas,
)
from irc.backends.tensorrt.target import Target
from irc.declare import REGISTRY, op_class
from irc.errors import Error
from irc.frontends.script import load_script
from irc.ops import Silu
from tests.cli.runner import shell, works
from tests.fresh import fresh
from tests.tensorrt.lint_models import model, node
from tests.tensorrt.test_compiling import MODEL, PLUGIN
from tests.user_code import EXAMPLE, taken_back

TARGET = Target.parse("tensorrt-rtx-1.7/sm_89")
TEXT = """module @capped {
  func @forward(%x: f32[3, 5]) -> (y: f32[3, 5]) {
    %y = soft_cap %x {cap=30.0} : f32[3, 5]
    return %y
  }
}
"""
# The example in two files: the operation, and the plugin with its lowering.
BEGINS, MEETS, ENDS = "@irc.operation(", "\n\nregister(", "\n\nclass Capped("


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with taken_back():
        yield


def parts() -> tuple[str, str]:
    text = EXAMPLE.read_text()
    whole = text[: text.index(ENDS)]
    begin, meet = whole.index(BEGINS), whole.index(MEETS)
    return whole[:meet], whole[:begin] + whole[meet:]


def layers(folder: Path) -> list[Any]:
    report = json.loads((folder / "rank0.report.json").read_text())
    return [each for each in report["layers"] if each["kind"] == "custom_layer"]


@pytest.mark.needs_rtx
@pytest.mark.parametrize(
    "words",
    [
        ["model.py", "--plugin", "twice.py"],
        ["capped.irc", "--load", "op.py", "--plugin", "plugin.py"],
        ["capped.irc", "--load", EXAMPLE],
        [
            "capped.irc",
            "--load",
            EXAMPLE,
            "--plugin",
            f"{EXAMPLE.parent}/../examples/{EXAMPLE.name}",
        ],
        [EXAMPLE, "--plugin", EXAMPLE, "--random-weights", "1"],
    ],
    ids=["declared by the model", "two files", "loaded", "loaded twice", "the example"],
)
def test_a_plugin_becomes_a_layer_of_an_engine(words: list[str | Path], tmp_path: Path) -> None:
    op, plugin = parts()
    files = {"model.py": MODEL, "twice.py": PLUGIN, "capped.irc": TEXT}
    for name, text in (files | {"op.py": op, "plugin.py": plugin}).items():
        (tmp_path / name).write_text(text)
    given = [tmp_path / word if (tmp_path / word).is_file() else word for word in words]
    out = tmp_path / "out"
    built = shell("compile", *given, "--backend", "tensorrt-rtx", "--no-cache", "-o", out)
    assert built.status == 0, built.err
    (layer,) = layers(out)
    assert layer["inputs"] and layer["outputs"]


@pytest.mark.needs_rtx
def test_an_onnx_file_with_a_node_of_a_plugin_becomes_an_engine(tmp_path: Path) -> None:
    load([EXAMPLE])
    fields = attributes_of("SoftCap", {"cap": 2.5}, "example")
    path = tmp_path / "m.onnx"
    path.write_bytes(
        model(node("SoftCap", "x", **fields), "x:f32[4,8]", "y:f32[4,8]").SerializeToString()
    )
    out = tmp_path / "out"
    words = ["--plugin", EXAMPLE, "--backend", "tensorrt-rtx", "--no-cache", "-o", out]
    built = shell("compile", path, *words)
    assert built.status == 0, built.err
    assert len(layers(out)) == 1 and "soft_cap" in (out / "module.irc").read_text()


def test_what_is_dumped_can_be_run_again(tmp_path: Path) -> None:
    (tmp_path / "capped.irc").write_text(TEXT)
    words = ["--plugin", EXAMPLE, "--backend", "tensorrt-rtx", "--no-build", "--dry-run"]
    works("compile", tmp_path / "capped.irc", *words, "--dump-dir", tmp_path / "dumps")
    dumps = sorted((tmp_path / "dumps").glob("*.irc"))
    assert dumps
    for dump in dumps:
        assert f"--load {EXAMPLE}" in dump.read_text().splitlines()[0]


def test_the_schema_is_that_of_the_plugin_as_it_is_now() -> None:
    for version in ("2.0", "3.0"):
        with taken_back():
            load([EXAMPLE])
            own = find("SoftCap", namespace="example")
            SPECS[own.key] = replace(own, fields=(Field("cap", "float", float(version)),))
            register_schemas()
            register_schemas()
            schema = onnx.defs.get_schema("SoftCap", 24)
            assert schema.attributes["cap"].default_value.s.decode() == version


def test_the_example_is_one_short_file() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100


def test_the_example_means_the_same_as_an_operation_and_as_a_plugin() -> None:
    load([EXAMPLE])
    x = fresh().standard_normal((3, 5)).astype(np.float32) * 40
    found = irc.evaluate(irc.parse(TEXT), {"x": x})["y"]
    softcap = find("SoftCap", namespace="example")
    ((same,),) = evaluate(softcap, {"cap": 30.0}, [(x,)])
    assert np.array_equal(found, same)
    assert np.allclose(found, 30 * np.tanh(x / 30), rtol=1e-5) and abs(found).max() <= 30
    with pytest.raises(Error, match=r"cap is -1\.0; it must be more than 0"):
        irc.parse(TEXT.replace("30.0", "-1.0"))


def test_the_factory_of_the_example_gives_a_model() -> None:
    load([EXAMPLE])
    module = load_script(str(EXAMPLE), {"width": "8", "classes": "3"})
    assert [op.opname for op in module.main] == ["linear", "soft_cap", "return"]


def test_a_lowering_by_name_waits_for_its_operation() -> None:
    before = lowerings(TARGET)

    @CHOICES.lower("late_operation", choice="Late", reason="-", source="-")
    def late(e: Any, op: Any) -> str:
        return ""

    assert lowerings(TARGET) is before
    operation = """
@irc.operation("late_operation")
class Late(irc.Op):
    x: irc.Operand
    def infer(self):
        return self.x.type
"""
    exec(operation, {"irc": irc, "__name__": __name__})
    cls = op_class("late_operation")
    assert lowerings(TARGET).covers(cls) and not before.covers(cls)
    (row,) = [row for row in rows(TARGET) if row.op == "late_operation"]
    assert row.choice == "Late"
    del REGISTRY["late_operation"]
    assert lowerings(TARGET) is before


def test_irc_s_own_lowerings_are_no_user_s() -> None:
    assert lowerings(TARGET).covers(Silu) and not CHOICES.users


def test_a_user_s_lowering_goes_before_that_of_irc() -> None:
    assert [row.choice for row in rows(TARGET) if row.op == "silu"] != ["Mine"]
    for named in (Silu, "silu"):
        with taken_back():
            CHOICES.lower(named, choice="Mine", reason="-", source="-")(lambda e, op: "")
            assert [row.choice for row in rows(TARGET) if row.op == "silu"] == ["Mine"]
            assert lowerings(Target.parse("tensorrt-11.4/sm_90")).covers(Silu)


def test_of_a_user_s_lowerings_the_first_that_fits_is_taken() -> None:
    choices = Choices()
    for choice in ("first", "second"):
        choices.lower("silu", choice=choice, reason="-", source="-")(lambda e, op: "")
    choices.users.pop(("silu", 1))
    choices.lower("silu", choice="third", reason="-", source="-")(lambda e, op: "")
    assert [each.choice for each in choices.of(Silu)] == ["second", "third"]


@pytest.mark.parametrize(
    ("fields", "domain", "message"),
    [
        ({}, "", "in the namespace 'example', not in ''"),
        ({}, "example", ""),
        ({"plugin_namespace": "example"}, "", ""),
        ({"plugin_namespace": "example", "plugin_version": "7"}, "", "version 7 of the plugin"),
        ({"plugin_namespace": "exampel"}, "", "in the namespace 'example', not in 'exampel'"),
    ],
)
def test_the_linter_knows_the_plugins_that_are_registered(
    fields: dict[str, str], domain: str, message: str
) -> None:
    made = node("SoftCap", "x", "y", domain, cap="2.0", **fields)
    bad = model(made, "x:f32[4,8]", "y:f32[4,8]")
    assert "unknown-plugin" in [each.rule for each in lint(bad, TARGET)]
    load([EXAMPLE])
    found = [each.message for each in lint(bad, TARGET) if each.rule == "unknown-plugin"]
    assert (message in found[0]) if message else not found


def test_the_linter_knows_the_types_behind_a_plugin() -> None:
    given = {"plugin_version": "1", "plugin_namespace": "example", "cap": "2.0"}
    made = [node("SoftCap", "x", "c", **given), node("Neg", "c")]
    bad = skeleton(model(made, "x:f32[4,8]", "y:f32[4,8]"))
    load([EXAMPLE])
    found, _ = types_of(bad, ())
    assert found["c"].shape == (4, 8) and found["c"].dtype == found["x"].dtype
