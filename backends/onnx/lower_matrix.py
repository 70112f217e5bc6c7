"""Matrix products, normalisation and quantized tensors as ONNX nodes.

DequantizeLinear has three forms of scales: one for all elements, one per index of a dimension, and
blocks along one dimension. Everything else is written by the expansion.
"""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Lowered
from irc.backends.onnx.lower_elementwise import apply, needs_f32
from irc.ir.core import Op, Value
from irc.ir.dims import Shape, exact_divide, product
from irc.ops.quant import block_sizes


@TABLE.lower(ops.Linear)
def linear(e: Emitter, op: ops.Linear) -> Lowered:
    """Gemm on matrices, with the weight as it is stored in the checkpoint."""
    operands = [e.flat(op.x), e.get(op.weight)]
    operands += [e.get(op.bias)] if op.bias is not None else []
    return Flat(e.add("Gemm", *operands, transB=1))


@TABLE.lower(ops.Matmul)
def matmul(e: Emitter, op: ops.Matmul) -> Lowered:
    """MatMul."""
    return apply(e, "MatMul", op.x.type.dtype, [e.get(op.x), e.get(op.y)])


def _matched(e: Emitter, vector: Value, x: Value) -> str:
    """A weight or bias in the dtype of x."""
    name, kind = e.get(vector), e.dtype(x)
    return name if e.dtype(vector) == kind else e.cast(name, kind)


@TABLE.lower(ops.RmsNorm)
def rms_norm(e: Emitter, op: ops.RmsNorm) -> Lowered:
    """RMSNormalization."""
    scale = _matched(e, op.weight, op.x)
    if op.offset:
        scale = e.add("Add", scale, e.number(op.offset, op.x.type.dtype))
    return Flat(e.add("RMSNormalization", e.flat(op.x), scale, axis=-1, epsilon=op.eps))


@TABLE.lower(ops.LayerNorm)
def layer_norm(e: Emitter, op: ops.LayerNorm) -> Lowered:
    """LayerNormalization."""
    if op.weight is not None:
        scale = _matched(e, op.weight, op.x)
    else:
        scale = e.filled(1, op.x.type.shape[-1:], op.x.type.dtype)
    bias = [_matched(e, op.bias, op.x)] if op.bias is not None else []
    return Flat(e.add("LayerNormalization", e.flat(op.x), scale, *bias, axis=-1, epsilon=op.eps))


@TABLE.lower(ops.GroupNorm, unless=needs_f32)
def group_norm(e: Emitter, op: ops.GroupNorm) -> Lowered:
    """InstanceNormalization with one instance per group: no kernel has GroupNormalization."""
    x, kind = op.x.type, op.x.type.dtype
    size = exact_divide(product(x.shape[1:]), op.groups)
    assert size is not None  # the channels are a multiple of the groups
    grouped = e.reshape(e.get(op.x), (x.shape[0], op.groups, size))
    ones, zeros = (e.filled(value, (op.groups,), kind) for value in (1, 0))
    done = e.add("InstanceNormalization", grouped, ones, zeros, epsilon=op.eps)
    done = e.reshape(done, x.shape)
    channels = (x.shape[1], *[1] * (x.ndim - 2))
    if op.weight is not None:
        done = e.add("Mul", done, e.reshape(_matched(e, op.weight, op.x), channels))
    if op.bias is not None:
        done = e.add("Add", done, e.reshape(_matched(e, op.bias, op.x), channels))
    return done


def per_index(op: ops.Dequantize) -> int | None:
    """The only dimension whose indices have different scales, -1 if all have the same."""
    own = [dim for dim, blocks in enumerate(op.scale.type.shape) if blocks != 1]
    if not own:
        return -1
    return (
        own[0] if len(own) == 1 and op.scale.type.shape[own[0]] == op.x.type.shape[own[0]] else None
    )


def in_blocks(op: ops.Dequantize) -> tuple[int, int] | None:
    """(the only dimension in blocks, their size), where all others have scales per index."""
    sizes = block_sizes(op.x.type.shape, op.scale.type.shape)
    found = [(dim, size) for dim, size in enumerate(sizes) if size != 1]
    if len(found) != 1:
        return None
    dim, size = found[0]
    return (dim, size) if isinstance(size, int) else None


def scales_refusal(op: Op) -> str | None:
    """Why the scales fit no form of DequantizeLinear."""
    assert isinstance(op, ops.Dequantize)
    if per_index(op) is not None or in_blocks(op) is not None:
        return None
    return "has blocks along several dimensions, which DequantizeLinear does not have"


def _refusal(op: Op) -> str | None:
    kind = op.operands[0].type.dtype
    return f"takes {kind}, which is f32 by then" if kind.startswith("f8") else scales_refusal(op)


@TABLE.lower(ops.Dequantize, unless=_refusal)
def dequantize(e: Emitter, op: ops.Dequantize) -> Lowered:
    """DequantizeLinear."""
    dim, blocks = per_index(op), in_blocks(op)
    scales: Shape | None = None
    attributes: dict[str, int] = {}
    if dim is not None:
        scales = () if dim < 0 else (op.scale.type.shape[dim],)
        attributes = {} if dim < 0 else {"axis": dim}
    elif blocks is not None:
        attributes = {"axis": blocks[0], "block_size": blocks[1]}
    x, *zero = _quantized(e, [op.x, *([op.zero] if op.zero is not None else [])])
    kind, made = e.dtype(op.scale), e.dtype(op.result)  # a node makes the dtype of its scales
    scale = e.get(op.scale) if kind == made else e.cast(e.get(op.scale), "f32")
    shaped = [scale, *zero]
    if scales is not None:
        shaped = [e.add("Reshape", name, e.shape(scales)) for name in shaped]
    found = e.add("DequantizeLinear", x, *shaped, **attributes)
    return found if made in (kind, "f32") else e.cast(found, made)


def _quantized(e: Emitter, values: list[Value]) -> list[str]:
    """The names of values of one dtype: weights as stored, maybe in four bits."""
    weights = [weight for value in values if (weight := e.weight(value)) is not None]
    if len(weights) < len(values):  # what is computed is wider
        return [e.get(value) for value in values]
    return [e.stored(weight)[0] for weight in weights]
