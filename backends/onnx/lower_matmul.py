"""Matrix products as ONNX nodes."""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Lowered
from irc.backends.onnx.lower_elementwise import apply


@TABLE.lower(ops.Linear)
def linear(e: Emitter, op: ops.Linear) -> Lowered:
    # Gemm reads the weight as it lies in the checkpoint; it takes matrices only.
    operands = [e.flat(op.x), e.get(op.weight)]
    operands += [e.get(op.bias)] if op.bias is not None else []
    return Flat(e.add("Gemm", *operands, transB=1))


@TABLE.lower(ops.Matmul)
def matmul(e: Emitter, op: ops.Matmul) -> Lowered:
    return apply(e, "MatMul", op.x.type.dtype, [e.get(op.x), e.get(op.y)])
