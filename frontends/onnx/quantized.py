"""Quantized tensors: DequantizeLinear in its three forms of scales."""

from __future__ import annotations

from irc import ops
from irc.core import Value
from irc.dims import Dim, Shape, exact_divide, product
from irc.dtypes import is_float
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.rules import Made, reads
from irc.frontends.onnx.tensors import DTYPES


@reads("DequantizeLinear", known="axis block_size output_dtype")
def dequantize(b: Builder, node: Node) -> Made:
    x, scale, zero = node.input(0), node.input(1), node.optional(2)
    shape = _scales(node, x, scale)
    if zero is not None and product(zero.shape) != product(scale.shape):
        raise Error(f"DequantizeLinear has {zero.shape} zero points for {scale.shape} scales")
    scales = _shaped(b, scale, shape)
    wanted = DTYPES.get(node.integer("output_dtype", 0), scale.dtype)
    if wanted != scale.dtype and scale.dtype != "f32":  # the result is rounded once, to `wanted`
        scales = b.value(ops.Cast(scales, dtype="f32"))
    zeros = _shaped(b, zero, shape) if zero is not None and _moves(zero) else None
    found = b.value(ops.Dequantize(b.get(x), scales, zero=zeros))
    return found if wanted == found.type.dtype else b.value(ops.Cast(found, dtype=wanted))


def _scales(node: Node, x: Entry, scale: Entry) -> Shape:
    """The shape of scales with all dimensions of x."""
    block, axis = node.integer("block_size", 0), node.integer("axis", 1)
    if scale.shape in ((), (1,)) and not block:
        return (1,) * x.rank
    if not -x.rank <= axis < x.rank:
        raise Error(f"DequantizeLinear along axis {axis} of {x.rank} dimensions")
    axis %= x.rank
    if not block:
        if scale.rank != 1:
            raise Error(f"DequantizeLinear has scales of {scale.rank} dimensions and no block_size")
        return (*(1,) * axis, scale.shape[0], *(1,) * (x.rank - axis - 1))
    blocks = exact_divide(x.shape[axis], block)
    if blocks is None or scale.shape != (*x.shape[:axis], blocks, *x.shape[axis + 1 :]):
        raise Error(
            f"DequantizeLinear has scales {list(scale.shape)} for blocks of {block} along axis "
            f"{axis} of {list(x.shape)}; blocks must be whole"
        )
    return scale.shape


def _shaped(b: Builder, entry: Entry, shape: Shape) -> Value:
    """The elements of an entry in a shape."""
    if entry.shape == shape:
        return b.get(entry)
    value = b.based(entry)
    return value if value.type.shape == shape else b.value(ops.Reshape(value, shape=shape))


def _moves(zero: Entry) -> bool:
    """Whether a zero point may be other than 0."""
    content = content_of(zero)
    known = content is not None and not any(isinstance(n, Dim) for n in content.flat)
    return not (is_float(zero.dtype) or (known and not any(content.flat)))  # type: ignore[union-attr]
