"""The chain of blocks of benchmarks/ir.py in onnx-ir."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from benchmarks.timing import check, timed


def steps(blocks: int) -> dict[str, float]:
    """Seconds per step in onnx-ir; it has no verifier."""

    def build() -> Any:
        kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([4, 8])
        source = ir.Value(name="x", type=kind, shape=shape)
        nodes: list[Any] = []
        x = source
        for _ in range(blocks):
            silu = ir.Node("chain", "Silu", [x])
            mul = ir.Node("", "Mul", [silu.outputs[0], x])
            add = ir.Node("", "Add", [mul.outputs[0], x])
            neg = ir.Node("", "Neg", [add.outputs[0]])
            for node in (silu, mul, add, neg):
                node.outputs[0].type, node.outputs[0].shape = kind, shape
            nodes += [silu, mul, add, neg]
            x = neg.outputs[0]
        opsets = {"": 20, "chain": 1}
        graph = ir.Graph([source], [x], nodes=nodes, opset_imports=opsets, name="chain")
        return ir.Model(graph, ir_version=10)

    def fuse(model: Any) -> None:
        graph = model.graph
        for node in graph:
            if node.op_type != "Mul":
                continue
            silu = node.inputs[0].producer()
            if silu is None or silu.op_type != "Silu" or silu.inputs[0] is not node.inputs[1]:
                continue
            new = ir.Node("", "Sigmoid", [node.inputs[1]])
            new.outputs[0].type = node.outputs[0].type
            new.outputs[0].shape = node.outputs[0].shape
            graph.insert_before(node, new)
            ir.convenience.replace_all_uses_with(node.outputs[0], new.outputs[0])
            graph.remove([node, silu], safe=True)

    seconds: dict[str, float] = {}
    model = timed(seconds, "build", build)
    timed(seconds, "print", lambda: str(model))
    proto = ir.to_proto(model)
    timed(seconds, "parse", lambda: ir.from_proto(proto))
    timed(seconds, "fuse", lambda: fuse(model))
    check(sum(node.op_type == "Sigmoid" for node in model.graph), blocks)
    return seconds
