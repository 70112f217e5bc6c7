"""Operations whose nodes for TensorRT differ little from those for ONNX Runtime, and those beside
collectives."""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import Flat, Lowered
from irc.backends.onnx.lower_collective import rank as constant_rank
from irc.backends.onnx.lower_elementwise import bitcast
from irc.backends.onnx.lower_matrix import matmul
from irc.backends.onnx.lower_shape import known_rows
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter, is_odd
from irc.backends.tensorrt.lowering.lower_quantized import (
    product_input,
    scaled_rows,
    transposed_weight,
)
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.backends.tensorrt.target import BUILDER
from irc.ir.core import Op, Weight
from irc.ir.dims import Dim
from irc.ir.dtypes import is_float


@CHOICES.lower(
    ops.Argmax,
    choice="ArgMax",
    reason="the layer behind it takes no vectors, so that one becomes a row",
    source="INetworkDefinition::addTopK, NvInfer.h",
)
def argmax(e: TensorRTEmitter, op: ops.Argmax) -> Lowered:
    """ArgMax of `x`, as i32; a vector is computed as one row."""
    x = e.get(op.x)
    if op.x.type.ndim > 1:
        return e.cast(e.add("ArgMax", x, axis=op.dim, keepdims=int(op.keep)), "i32")
    row = e.add("ArgMax", e.add("Unsqueeze", x, e.ints(0)), axis=1, keepdims=int(op.keep))
    return e.cast(e.add("Squeeze", row, e.ints(0)), "i32")


def _integer_product(op: Op) -> str | None:
    kind = op.operands[0].type.dtype
    return None if is_float(kind) else f"multiplies {kind}, and TensorRT only floats"


@CHOICES.lower(
    ops.Linear,
    choice="Gemm",
    reason="padding is stored behind odd sizes of weights outside the engine and of i8 and f8e4m3, "
    "else TensorRT copies the weight to an even size at every step",
    source=BUILDER,
)
def linear(e: TensorRTEmitter, op: ops.Linear) -> Lowered:
    """Gemm on matrices, times the scales of its rows where they are per token; with a padded weight
    between Pad and Slice of the other operands."""
    x, scale = product_input(e, op.x, op.weight)
    padded = _padded_weight(e, op)
    other = transposed_weight(e, op.weight) if padded is None else None
    weight, rows = other or (e.get(op.weight) if padded is None else padded[0]), None
    if padded is not None:
        sizes = [int(str(size)) for size in op.weight.type.shape]
        rows = sizes[0] if sizes[0] != padded[1][0] else None
        if sizes[1] != padded[1][1]:
            more = e.ints(0, 0, 0, padded[1][1] - sizes[1])
            x = e.add("Pad", x, more, e.number(0, op.x.type.dtype))
    bias, way = [e.get(op.bias)] if op.bias is not None else [], {} if other else {"transB": 1}
    if rows is None and scale is None:
        return Flat(e.add("Gemm", x, weight, *bias, **way))
    y = e.add("Gemm", x, weight, **way)
    if rows is not None:
        y = e.add("Slice", y, e.ints(0), e.ints(rows), e.ints(1))
    if scale is not None:
        y = scaled_rows(e, y, scale, op.result.type.dtype)
    return Flat(e.add("Add", y, *bias) if bias else y)


def _padded_weight(e: TensorRTEmitter, op: ops.Linear) -> tuple[str, tuple[int, ...]] | None:
    """(name, shape) of the weight with padding; None where it is taken as it is."""
    root = e.root(op.weight)
    if root in e.padded:
        return e.padded[root]
    return e.aligned(root) if isinstance(root, Weight) and e.outside and is_odd(root) else None


CHOICES.lower(
    ops.Matmul,
    choice="MatMul",
    reason="of floats only",
    source="onnx/onnx-tensorrt 5ab48c5c, MatMul",
    unless=_integer_product,
)(matmul)


@CHOICES.lower(
    ops.Embedding,
    choice="Gather",
    reason="a table that is also multiplied is an input of its own, else TensorRT copies it",
    source="activation memory in the builder's log, TensorRT-RTX 1.7.1.116",
)
def embedding(e: TensorRTEmitter, op: ops.Embedding) -> Lowered:
    """Rows of a table or of a weight."""
    weight = e.weight(op.table)
    table = e.get(op.table) if weight is None else e.rows(weight)
    return known_rows(e, op, lambda ids: e.add("Gather", table, ids, axis=0))


CHOICES.lower(
    ops.Bitcast,
    choice="none",
    reason="the parser has no BitCast",
    source="OnnxParser.supports_operator, TensorRT-RTX 1.7.1.116",
    unless=lambda op: "is no operator that TensorRT has; compute it outside",
)(bitcast)


_REDUCTIONS = {
    "add": ("Add", "ReduceSum"),
    "mul": ("Mul", "ReduceProd"),
    "max": ("Max", "ReduceMax"),
    "min": ("Min", "ReduceMin"),
}


@CHOICES.lower(
    ops.ScatterElements,
    choice="ScatterElements",
    reason="with a reduction a mask of updates and places, which TensorRT never stores",
    source="activation memory of engines, TensorRT-RTX 1.7.1.116; onnx/onnx-tensorrt 5ab48c5c",
)
def scatter_elements(e: TensorRTEmitter, op: ops.ScatterElements) -> Lowered:
    """`x` with `updates` written at `indices` along one dimension, or combined with what is there.

    The latter compares all indices [..., N, 1, ...] with all places [M, ...].
    """
    x, updates = e.get(op.x), e.get(op.updates)
    if op.reduction == "none":
        return e.add("ScatterElements", x, e.get(op.indices), updates, axis=op.dim)
    ndim, combine, kind = op.x.type.ndim, *_REDUCTIONS[op.reduction]
    at = op.dim % ndim
    size = op.x.type.shape[at]
    places = e.add("Reshape", e.iota(size), e.ints(-1, *(1,) * (ndim - at - 1)))
    indices = e.add("Unsqueeze", e.cast64(op.indices), e.ints(at + 1))
    backwards = e.add("Less", indices, e.ints(0))
    indices = e.add("Where", backwards, e.add("Add", indices, e.dim(size)), indices)
    if op.reduction in ("max", "min"):
        other = e.add("Unsqueeze", x, e.ints(at))
    else:
        other = e.number(int(op.reduction == "mul"), op.x.type.dtype)
    updates = e.add("Unsqueeze", updates, e.ints(at + 1))
    placed = e.add("Where", e.add("Equal", indices, places), updates, other)
    return e.add(combine, x, e.add(kind, placed, e.ints(at), keepdims=0))


@CHOICES.lower(
    ops.Rank,
    choice="i32 input",
    reason="one engine serves all ranks of a stage; a constant where weights are inside",
    source="irc/decisions/0011-one-engine-for-all-ranks-of-a-stage.md",
)
def rank(e: TensorRTEmitter, op: ops.Rank) -> Lowered:
    """A rank's position along mesh axes, i32[]."""
    return e.position(op.axes) if e.outside else constant_rank(e, op)


def _symbolic_width(op: Op) -> str | None:
    """Refuses what the kernel of the plugin does not take."""
    if isinstance(op.operands[0].type.shape[-1], Dim):
        return "has rows of a symbolic width"
    return None


@CHOICES.lower(
    ops.AllReduceRmsNorm,
    choice=COLLECTIVE_PLUGIN,
    reason="the sum, the residual and the norm are one kernel behind the collective",
    source="irc/ops/fused_collective.py",
    unless=_symbolic_width,
)
def all_reduce_rms_norm(e: TensorRTEmitter, op: ops.AllReduceRmsNorm) -> Lowered:
    """(the normed sum, the sum) as matrices."""
    x, residual = e.flat(op.x), e.flat(op.residual)
    kind = op.x.type.dtype
    scale = e.converted(op.weight, kind)
    group_size = e.module.mesh.group_size(op.axes)
    if group_size > 1:
        normed, total = e.plugin(
            op.axes,
            "all_reduce_rms_norm",
            "sum",
            -1,
            [x, residual, scale],
            outputs=2,
            eps=repr(op.eps),
            offset=repr(op.offset),
        )
        return Flat(normed), Flat(total)
    total = e.add("Add", x, residual)
    if op.offset:
        scale = e.add("Add", scale, e.number(op.offset, kind))
    return Flat(e.add("RMSNormalization", total, scale, axis=-1, epsilon=op.eps)), Flat(total)
