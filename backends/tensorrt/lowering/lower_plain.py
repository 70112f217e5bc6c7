"""Operations whose nodes for TensorRT differ in a detail only."""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import Lowered
from irc.backends.onnx.lower_matmul import matmul
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.core import Op
from irc.dtypes import is_float


@CHOICES.lower(
    ops.Argmax,
    choice="ArgMax",
    reason="the layer behind it takes no vectors, so that one becomes a row",
    source="INetworkDefinition::addTopK, NvInfer.h",
)
def argmax(e: TensorRTEmitter, op: ops.Argmax) -> Lowered:
    x, rank = e.get(op.x), op.x.type.rank
    if rank > 1:
        return e.cast(e.add("ArgMax", x, axis=op.dim, keepdims=int(op.keep)), "i32")
    row = e.add("ArgMax", e.add("Unsqueeze", x, e.ints(0)), axis=1, keepdims=int(op.keep))
    return e.cast(e.add("Squeeze", row, e.ints(0)), "i32")


def floats(op: Op) -> str | None:
    """Refuses products of integers."""
    kind = op.operands[0].type.dtype
    return None if is_float(kind) else f"multiplies {kind}, and TensorRT only floats"


CHOICES.lower(
    ops.Matmul,
    choice="MatMul",
    reason="of floats only",
    source="onnx/onnx-tensorrt 5ab48c5c, MatMul",
    unless=floats,
)(matmul)
