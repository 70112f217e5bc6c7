"""Matrix products and normalisation as ONNX nodes."""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Lowered
from irc.backends.onnx.lower_elementwise import apply, needs_f32
from irc.ir.core import Value
from irc.ir.dims import exact_divide, product


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


@TABLE.lower(ops.Conv, unless=needs_f32)
def conv(e: Emitter, op: ops.Conv) -> Lowered:
    """Conv."""
    strides, before, after, dilations, _ = zip(*op.windows(), strict=True)
    operands = [e.get(value) for value in op.operands]
    pads = (*before, *after)
    return e.add(
        "Conv", *operands, strides=strides, pads=pads, dilations=dilations, group=op.groups
    )


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
