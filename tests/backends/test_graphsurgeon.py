"""Graphs of onnx-graphsurgeon: of modules, edited as users do, and read back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import helper

import irc
from irc.backends.onnx import to_graphsurgeon
from irc.backends.reference import evaluate
from irc.frontends.onnx import from_graphsurgeon
from irc.frontends.onnx.rules import Plugin
from tests.fresh import fresh
from tests.frontends.onnx_models import model, on_ort, saved

LAYER = """module @m dims(B=1:2:8) {
  weight @w : f32[8, 4] = random("w", 1, 0.5)
  func @forward(%x: f32[B, 4]) -> (y: f32[B, 8]) {
    %h = linear %x, @w : f32[B, 8]
    %s = sigmoid %h : f32[B, 8]
    %y = mul %h, %s : f32[B, 8]
    return %y
  }
}"""


def inputs() -> dict[str, Any]:
    return {"x": fresh(1).standard_normal((3, 4)).astype(np.float32)}


def test_a_subgraph_becomes_a_plugin_that_is_compiled(tmp_path: Path) -> None:
    """Sigmoid and Mul become one node of a plugin, whose operation is silu."""
    module = irc.parse(LAYER)
    given = inputs()
    wanted = evaluate(module, given)["y"]
    graph = to_graphsurgeon(module)
    (product,) = [node for node in graph.nodes if node.op == "Mul"]
    words = {"plugin_version": "1", "plugin_namespace": "example"}
    (hidden,) = [x for x in product.inputs if x.inputs[0].op == "Gemm"]
    graph.layer(op="FastSilu", inputs=[hidden], outputs=list(product.outputs), attrs=words)
    product.outputs.clear()
    graph.cleanup()
    with pytest.raises(irc.Error, match="it is a plugin's; name the file that registers"):
        from_graphsurgeon(graph)
    plugins = {("example", "FastSilu"): Plugin("silu", lambda version, texts: texts)}
    edited = from_graphsurgeon(
        graph, tmp_path / "edited.onnx", plugins=plugins, dims={"B": (1, 2, 8)}
    )
    assert edited.dims == module.dims
    assert [op.opname for op in edited.ops()] == ["linear", "silu", "return"]
    artifact = irc.compile(edited, tmp_path / "out")
    np.testing.assert_allclose(artifact.run(given)["y"], wanted, rtol=1e-5, atol=1e-6)


def test_an_edited_graph_of_another_tool_is_read(tmp_path: Path) -> None:
    """Nodes out of order and a new constant; the file goes with the module."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    weight = fresh(2).standard_normal((4, 300)).astype(np.float32)
    made = model(nodes, {"x": ("f32", ("B", 4))}, ["y"], {"w": weight})
    made.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    graph: Any = gs.import_onnx(made)
    graph.nodes[1].op = "Sigmoid"
    shift = gs.Constant("shift", np.arange(300, dtype=np.float32) / 100)
    hidden, moved = graph.nodes[0].outputs[0], gs.Variable("moved", np.float32)
    graph.nodes[1].inputs = [moved]
    graph.nodes.append(gs.Node("Add", inputs=[hidden, shift], outputs=[moved]))
    module = from_graphsurgeon(graph)
    (path,) = module.files.values()
    (wanted,) = on_ort(saved(gs.export_onnx(graph.toposort()), tmp_path), inputs())
    np.testing.assert_allclose(evaluate(module, inputs())["y"], wanted, rtol=1e-5, atol=1e-6)
    assert Path(path).exists()
    del module
    gc.collect()
    assert not Path(path).exists()


def test_a_graph_is_of_one_rank() -> None:
    with pytest.raises(irc.Error, match=r"the mesh \(tp=2\) has 2; edit the module before"):
        to_graphsurgeon(
            irc.parse(
                "module @m mesh(tp=2) { func @forward(%x: f32[B]) -> (f32[B]) { return %x } }"
            )
        )
