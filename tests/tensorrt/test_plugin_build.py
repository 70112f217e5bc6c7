"""Engines with plugins, built by TensorRT-RTX without a GPU."""

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from irc.backends.tensorrt.builder.build import build
from irc.backends.tensorrt.plugins import attributes_of
from irc.backends.tensorrt.plugins.collective import FUSED, OPERATIONS, REDUCING, ROOTED
from irc.errors import Error
from tests.tensorrt.graphs import BF16, F32, I64, asked, node, profile, save, value

pytestmark = pytest.mark.needs_rtx


def fields(operation: str, **more: Any) -> dict[str, str]:
    """The attributes of a collective of two ranks."""
    values: dict[str, Any] = {"operation": operation, "group": "dp.tp", "group_size": 2}
    if operation in REDUCING:
        values["reduce_op"] = "sum"
    if operation in ROOTED:
        values["root"] = 1
    return attributes_of("IrcCollective", values | more)


def plain(operation: str, x: str, y: str) -> onnx.NodeProto:
    return node(f"layers.0/{y}", "IrcCollective", [x], y, line=7, **fields(operation))


def test_every_collective_becomes_a_custom_layer(tmp_path: Path) -> None:
    kinds = [each for each in OPERATIONS if each != FUSED]
    nodes = [plain(kind, "x", f"y_{kind}") for kind in kinds]
    sizes = {"all_gather": "G", "gather": "G", "reduce_scatter": "P", "scatter": "P"}
    outputs = [value(f"y_{kind}", [sizes.get(kind, "B"), 6], BF16) for kind in kinds]
    path = save(tmp_path / "m.onnx", nodes, [value("x", ["B", 6], BF16)], outputs)
    built = build(asked(path, [profile("decode", path, B=(2, 4, 64))]))
    layers = [each for each in built.report.layers if each.kind == "custom_layer"]
    assert len(layers) == len(kinds)
    named = {layer.operations[0]: layer for layer in layers}
    assert set(named) == {f"layers.0/y_{kind}" for kind in kinds}
    assert {each.dtype for layer in layers for each in (*layer.inputs, *layer.outputs)} == {"bf16"}
    engine = built.engine.read_bytes()
    for text in (b"IrcCollective", b"irc", b"dp.tp", *(kind.encode() for kind in kinds)):
        assert text in engine, text


@pytest.mark.parametrize(("kind", "code"), [("f32", F32), ("i64", I64)])
def test_other_dtypes_of_collectives(tmp_path: Path, kind: str, code: int) -> None:
    nodes = [plain("all_reduce", "x", "y")]
    tensors = [value(name, [4, 6], code) for name in "xy"]
    built = build(asked(save(tmp_path / "m.onnx", nodes, tensors[:1], tensors[1:])))
    (layer,) = [each for each in built.report.layers if each.kind == "custom_layer"]
    assert layer.inputs[0].dtype == layer.outputs[0].dtype == kind


def test_the_fused_operation_builds_the_same_bytes_twice(tmp_path: Path) -> None:
    texts = fields(FUSED, eps=2.5e-6)
    made = helper.make_node(
        "IrcCollective", ["x", "r", "w"], ["normed", "total"], name="l.0/n/IrcCollective", **texts
    )
    shape = ["B", "S", 5]
    inputs = [value("x", shape, BF16), value("r", shape, BF16), value("w", [5], BF16)]
    outputs = [value("normed", shape, BF16), value("total", shape, BF16)]
    path = save(tmp_path / "m.onnx", [made], inputs, outputs)
    request = asked(path, [profile("decode", path, B=(1, 2, 4), S=(1, 1, 1))])
    first = build(request)
    (layer,) = [each for each in first.report.layers if each.kind == "custom_layer"]
    assert (len(layer.inputs), len(layer.outputs)) == (3, 2)
    engine = first.engine.read_bytes()
    assert b"2.5e-06" in engine
    assert build(request).engine.read_bytes() == engine


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"operation": "all_gathr"}, "all_gathr"),
        ({"root": "0"}, "has no root"),
        ({"plugin_version": "9"}, "Plugin not found|version 9"),
    ],
)
def test_a_wrong_node_is_an_error_that_names_it(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    texts = {**fields("all_gather"), **changes}
    nodes = [node("layers.0/gather", "IrcCollective", ["x"], "y", line=7, **texts)]
    path = save(tmp_path / "m.onnx", nodes, [value("x", [4, 6])], [value("y", [8, 6])])
    with pytest.raises(Error, match=r"layers\.0/gather") as failure:
        build(asked(path))
    assert failure.match(reason)
