"""Reshaping, reordering, cutting, joining and repeating as ONNX nodes."""

from __future__ import annotations

import numpy as np

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Lowered

_FIRST = int(np.iinfo(np.int64).min)  # where a backward slice ends that takes the first element


@TABLE.lower(ops.Reshape)
def reshape(e: Emitter, op: ops.Reshape) -> Lowered:
    return e.reshape(e.get(op.x), op.shape)


@TABLE.lower(ops.Expand)
def expand(e: Emitter, op: ops.Expand) -> Lowered:
    return e.add("Expand", e.get(op.x), e.sizes(op.shape))


@TABLE.lower(ops.Squeeze)
def squeeze(e: Emitter, op: ops.Squeeze) -> Lowered:
    return e.add("Squeeze", e.get(op.x), e.ints(*op.dims))


@TABLE.lower(ops.Unsqueeze)
def unsqueeze(e: Emitter, op: ops.Unsqueeze) -> Lowered:
    return e.add("Unsqueeze", e.get(op.x), e.ints(*op.dims))


@TABLE.lower(ops.Transpose)
def transpose(e: Emitter, op: ops.Transpose) -> Lowered:
    rank = op.x.type.rank
    return e.add("Transpose", e.get(op.x), perm=[i % rank for i in op.order])


@TABLE.lower(ops.Slice)
def slice_(e: Emitter, op: ops.Slice) -> Lowered:
    ends = e.dim(op.start), e.dim(op.stop)
    return e.add("Slice", e.get(op.x), *ends, e.ints(op.dim), e.ints(op.step))


@TABLE.lower(ops.Split)
def split(e: Emitter, op: ops.Split) -> Lowered:
    if len(op.sizes) == 1:
        return e.get(op.x)
    sizes = e.sizes(op.sizes)
    return e.graph.several(len(op.sizes), "Split", e.get(op.x), sizes, axis=op.dim)


@TABLE.lower(ops.Concat)
def concat(e: Emitter, op: ops.Concat) -> Lowered:
    return e.add("Concat", *[e.get(v) for v in op.values], axis=op.dim)


@TABLE.lower(ops.Flip)
def flip(e: Emitter, op: ops.Flip) -> Lowered:
    count = len(op.dims)
    ends = [e.ints(*[-1] * count), e.ints(*[_FIRST] * count)]
    return e.add("Slice", e.get(op.x), *ends, e.ints(*op.dims), e.ints(*[-1] * count))


@TABLE.lower(ops.Repeat)
def repeat(e: Emitter, op: ops.Repeat) -> Lowered:
    shape = op.x.type.shape
    after = op.dim % len(shape) + 1
    wide = e.add("Unsqueeze", e.get(op.x), e.ints(after))
    wide = e.add("Expand", wide, e.sizes((*shape[:after], op.count, *shape[after:])))
    return e.reshape(wide, op.result.type.shape)


@TABLE.lower(ops.Pad)
def pad(e: Emitter, op: ops.Pad) -> Lowered:
    if not op.before:
        return e.get(op.x)
    kind = e.dtype(op.x)
    wide = "i32" if kind in e.missing.get("Pad", ()) else kind
    sizes, value = e.sizes((*op.before, *op.after)), e.number(op.value, wide)
    x = e.get(op.x)
    if wide == kind:
        return e.add("Pad", x, sizes, value)
    return e.cast(e.add("Pad", e.cast(x, wide), sizes, value), kind)
