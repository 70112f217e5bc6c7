"""Engines with plugins, built by TensorRT-RTX without a GPU."""

from pathlib import Path
from typing import Any

import onnx
import pytest

from irc.backends.tensorrt.builder.build import build
from irc.backends.tensorrt.plugins import attributes_of
from irc.backends.tensorrt.plugins.collective import FUSED, OPERATIONS, REDUCING, ROOTED
from irc.errors import Error
from tests.tensorrt.graphs import asked, at, node, profile, saved

pytestmark = pytest.mark.needs_rtx


def fields(operation: str, **more: Any) -> dict[str, str]:
    """The attributes of a collective of two ranks."""
    values: dict[str, Any] = {"operation": operation, "group": "dp.tp", "group_size": 2}
    if operation in REDUCING:
        values["reduce_op"] = "sum"
    if operation in ROOTED:
        values["root"] = 1
    return attributes_of("IrcCollective", values | more)


def plain(operation: str, y: str) -> onnx.NodeProto:
    return at(f"layers.0/{y}", 7, node("IrcCollective", "x", y, **fields(operation)))


def test_every_collective_becomes_a_custom_layer(tmp_path: Path) -> None:
    kinds = [each for each in OPERATIONS if each != FUSED]
    nodes = [plain(kind, f"y_{kind}") for kind in kinds]
    sizes = {"all_gather": "G", "gather": "G", "reduce_scatter": "P", "scatter": "P"}
    outputs = " ".join(f"y_{kind}:bf16[{sizes.get(kind, 'B')},6]" for kind in kinds)
    path = saved(tmp_path, nodes, "x:bf16[B,6]", outputs)
    built = build(asked(path, [profile("decode", path, B=(2, 4, 64))]))
    layers = [each for each in built.report.layers if each.kind == "custom_layer"]
    assert len(layers) == len(kinds)
    named = {layer.operations[0]: layer for layer in layers}
    assert set(named) == {f"layers.0/y_{kind}" for kind in kinds}
    assert {each.dtype for layer in layers for each in (*layer.inputs, *layer.outputs)} == {"bf16"}
    engine = built.engine.read_bytes()
    for text in (b"IrcCollective", b"irc", b"dp.tp", *(kind.encode() for kind in kinds)):
        assert text in engine, text


@pytest.mark.parametrize("kind", ["f32", "i64"])
def test_other_dtypes_of_collectives(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, plain("all_reduce", "y"), f"x:{kind}[4,6]", f"y:{kind}[4,6]")
    built = build(asked(path))
    (layer,) = [each for each in built.report.layers if each.kind == "custom_layer"]
    assert layer.inputs[0].dtype == layer.outputs[0].dtype == kind


def test_the_fused_operation_builds_the_same_bytes_twice(tmp_path: Path) -> None:
    texts = fields(FUSED, eps=2.5e-6)
    made = node("IrcCollective", "x r w", "normed total", **texts)
    inputs = "x:bf16[B,S,5] r:bf16[B,S,5] w:bf16[5]"
    path = saved(tmp_path, made, inputs, "normed:bf16[B,S,5] total:bf16[B,S,5]")
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
    made = at("layers.0/gather", 7, node("IrcCollective", "x", **texts))
    path = saved(tmp_path, made, "x:f16[4,6]", "y:f16[8,6]")
    with pytest.raises(Error, match=r"layers\.0/gather") as failure:
        build(asked(path))
    assert failure.match(reason)
