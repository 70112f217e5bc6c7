"""Users' plugins, from a file on the command line to a layer of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.backends.tensorrt.lowering.table import CHOICES, lowerings, rows
from irc.backends.tensorrt.plugins import load
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from irc.ir.declare import REGISTRY, op_class
from irc.ops import Silu
from tests.cli.runner import shell, works
from tests.fresh import fresh
from tests.tensorrt.graphs import model, node
from tests.tensorrt.test_compiling import MODEL, PLUGIN
from tests.user_code import EXAMPLE, restored_registries

TARGET = Target.parse("tensorrt-rtx-1.7/sm_89")
TEXT = """module @capped {
  func @forward(%x: f32[3, 5]) -> (y: f32[3, 5]) {
    %y = soft_cap %x {cap=30.0} : f32[3, 5]
    return %y
  }
}
"""
# Where the example is divided into two files: the operation, and the plugin with its lowering.

BEGIN, MIDDLE, END = "@irc.operation(", "\n\nregister(", "\n\nclass Capped("


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with restored_registries():
        yield


def parts() -> tuple[str, str]:
    text = EXAMPLE.read_text()
    source = text[: text.index(END)]
    begin, middle = source.index(BEGIN), source.index(MIDDLE)
    return source[:middle], source[:begin] + source[middle:]


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
            EXAMPLE.parent / "../examples" / EXAMPLE.name,
        ],
        [EXAMPLE, "--plugin", EXAMPLE, "--random-weights", "1"],
        ["m.onnx", "--plugin", EXAMPLE],
    ],
    ids=["declared by the model", "two files", "loaded", "loaded twice", "the example", "ONNX"],
)
def test_a_plugin_becomes_a_layer_of_an_engine(words: list[str | Path], tmp_path: Path) -> None:
    op, plugin = parts()
    files = {"model.py": MODEL, "twice.py": PLUGIN, "capped.irc": TEXT}
    for name, text in (files | {"op.py": op, "plugin.py": plugin}).items():
        (tmp_path / name).write_text(text)
    fields = {"plugin_version": "1", "plugin_namespace": "example", "cap": "2.5"}
    capped = model(node("SoftCap", "x", **fields), "x:f32[4,8]", "y:f32[4,8]")
    (tmp_path / "m.onnx").write_bytes(capped.SerializeToString())
    sources = [tmp_path / word if (tmp_path / word).is_file() else word for word in words]
    out = tmp_path / "out"
    built = shell("compile", *sources, "--backend", "tensorrt-rtx", "--no-cache", "-o", out)
    assert built.status == 0, built.err
    (layer,) = layers(out)
    assert layer["inputs"] and layer["outputs"]


def test_a_dump_names_the_option_that_loads_it(tmp_path: Path) -> None:
    (tmp_path / "capped.irc").write_text(TEXT)
    words = ["--plugin", EXAMPLE, "--backend", "tensorrt-rtx", "--no-build", "--dry-run"]
    works("compile", tmp_path / "capped.irc", *words, "--dump-dir", tmp_path / "dumps")
    dumps = sorted((tmp_path / "dumps").glob("*.irc"))
    assert dumps
    for dump in dumps:
        assert f"--load {EXAMPLE}" in dump.read_text().splitlines()[0]


def test_the_operation_of_the_example_caps_its_operand() -> None:
    load([EXAMPLE])
    x = fresh().standard_normal((3, 5)).astype(np.float32) * 40
    found = irc.evaluate(irc.parse(TEXT), {"x": x})["y"]
    assert np.allclose(found, 30 * np.tanh(x / 30), rtol=1e-5) and abs(found).max() <= 30
    with pytest.raises(Error, match=r"cap is -1\.0; it must be more than 0"):
        irc.parse(TEXT.replace("30.0", "-1.0"))


def test_a_lowering_by_name_applies_once_its_operation_is_declared() -> None:
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


def test_a_user_s_lowering_takes_precedence() -> None:
    assert lowerings(TARGET).covers(Silu) and not CHOICES.users

    assert [row.choice for row in rows(TARGET) if row.op == "silu"] != ["Mine"]
    for named in (Silu, "silu"):
        with restored_registries():
            CHOICES.lower(named, choice="Mine", reason="-", source="-")(lambda e, op: "")
            assert [row.choice for row in rows(TARGET) if row.op == "silu"] == ["Mine"]
            assert lowerings(Target.parse("tensorrt-11.4/sm_90")).covers(Silu)
