"""The chain of blocks of benchmarks/ir.py in xDSL and onnx-ir: (seconds per step, blocks fused)."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

import io
from typing import Any

import onnx_ir as ir
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp, TensorType, f32
from xdsl.dialects.test import TestOp
from xdsl.ir import Dialect
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, result_def, traits_def
from xdsl.parser import Parser
from xdsl.pattern_rewriter import (
    GreedyRewritePatternApplier,
    PatternRewriter,
    PatternRewriteWalker,
    RewritePattern,
    op_type_rewrite_pattern,
)
from xdsl.printer import Printer
from xdsl.traits import Pure

from benchmarks.process import timed


class Unary(IRDLOperation):
    x = operand_def(TensorType)
    out = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: Any) -> None:
        super().__init__(operands=[x], result_types=[x.type])


class Binary(IRDLOperation):
    x = operand_def(TensorType)
    y = operand_def(TensorType)
    out = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(operands=[x, y], result_types=[x.type])


@irdl_op_definition
class Silu(Unary):
    name = "chain.silu"


@irdl_op_definition
class Neg(Unary):
    name = "chain.neg"


@irdl_op_definition
class Sigmoid(Unary):
    name = "chain.sigmoid"


@irdl_op_definition
class Mul(Binary):
    name = "chain.mul"


@irdl_op_definition
class Add(Binary):
    name = "chain.add"


def build(blocks: int) -> Any:
    source = TestOp(result_types=[TensorType(f32, [4, 8])])
    ops: list[Any] = [source]
    x = source.results[0]
    for _ in range(blocks):
        silu = Silu(x)
        mul = Mul(silu.out, x)
        add = Add(mul.out, x)
        neg = Neg(add.out)
        ops += [silu, mul, add, neg]
        x = neg.out
    return ModuleOp([*ops, TestOp(operands=[x])])


class Fuse(RewritePattern):
    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: Mul, rewriter: PatternRewriter, /) -> None:
        if isinstance(op.x.owner, Silu) and op.x.owner.x is op.y:
            silu = op.x.owner
            rewriter.replace_matched_op(Sigmoid(op.y))
            rewriter.erase_op(silu)


def show(module: Any) -> str:
    stream = io.StringIO()
    Printer(stream).print_op(module)
    return stream.getvalue()


def parse(text: str) -> Any:
    context = Context(allow_unregistered=False)
    context.load_dialect(Builtin)
    context.load_dialect(Dialect("test", [TestOp], []))
    context.load_dialect(Dialect("chain", [Silu, Neg, Sigmoid, Mul, Add], []))
    return Parser(context, text).parse_module()


def xdsl_steps(blocks: int) -> tuple[dict[str, float], int]:
    """The steps in xDSL."""
    seconds: dict[str, float] = {}
    module = timed(seconds, "build", lambda: build(blocks))
    timed(seconds, "verify", module.verify)
    text = timed(seconds, "print", lambda: show(module))
    timed(seconds, "parse", lambda: parse(text))
    walker = PatternRewriteWalker(GreedyRewritePatternApplier([Fuse()]))
    timed(seconds, "fuse", lambda: walker.rewrite_module(module))
    return seconds, sum(isinstance(op, Sigmoid) for op in module.ops)


def onnx_ir_steps(blocks: int) -> tuple[dict[str, float], int]:
    """The steps in onnx-ir; it has no verifier."""

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
    return seconds, sum(node.op_type == "Sigmoid" for node in model.graph)
