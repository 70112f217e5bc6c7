"""Quantized tensors: QuantizeLinear, DequantizeLinear, and what is defined by them.

Operators on codes (QLinearMatMul, MatMulInteger, ...) become the operator on the numbers that the
codes stand for, between DequantizeLinear and QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.rules import (
    MICROSOFT,
    TABLE,
    Made,
    Refusal,
    entries_of,
    only,
    reads,
    refusal,
)
from irc.frontends.onnx.tensors import DTYPES
from irc.ir.core import Value
from irc.ir.dims import Shape, exact_divide, product
from irc.ir.dtypes import integer_range, is_float
from irc.ops.quant import QUANTIZED

_WIDE = ("i16", "u16", "i32")  # codes that dequantize and quantize of irc do not have
_LINEAR = "axis block_size output_dtype"


@reads("DequantizeLinear", domain=MICROSOFT, known="axis")
@reads("DequantizeLinear", known=_LINEAR)
def dequantize(b: Builder, node: Node) -> Made:
    """Scales for all elements, per index of an axis, or per block along it."""
    x, scale = node.input(0), node.input(1)
    kind = DTYPES.get(node.integer("output_dtype", 0), scale.dtype)
    return _numbers(b, node, x, scale, node.optional(2), kind=kind)


@reads("QuantizeLinear", domain=MICROSOFT, known="axis")
@reads("QuantizeLinear", known=f"{_LINEAR} precision saturate", refuses=only("saturate", 1))
def quantize(b: Builder, node: Node) -> Made:
    """Codes of the dtype of the zero point, else of `output_dtype`, else u8."""
    x, scale, zero = node.input(0), node.input(1), node.optional(2)
    return _codes(b, node, x, scale, zero, DTYPES.get(node.integer("output_dtype", 0), "u8"))


def _numbers(
    b: Builder,
    node: Node,
    x: Entry,
    scale: Entry,
    zero: Entry | None,
    axis: int = 1,
    kind: Any = "",
) -> Entry:
    """The numbers that codes stand for."""
    kind = kind or scale.dtype
    scales, zeros = _parameters(b, node, x, scale, zero, axis)
    if x.dtype not in _WIDE:
        return b.op(ops.Dequantize, x, scales, zero=zeros, dtype=kind)
    _without_blocks(node, x)
    wide = b.cast(x, "f32")
    if zeros is not None:
        wide = b.op(ops.Sub, wide, b.cast(b.entry(zeros), "f32"))
    return b.cast(b.op(ops.Mul, wide, b.cast(b.entry(scales), "f32")), kind)


def _codes(
    b: Builder, node: Node, x: Entry, scale: Entry, zero: Entry | None, kind: Any = "u8"
) -> Entry:
    """x / scale + zero, rounded and saturated, in the dtype of zero, or of this kind."""
    kind = zero.dtype if zero is not None else kind
    if kind not in (*QUANTIZED, "i16", "u16"):
        raise Error(f"{node.kind} makes {kind}; there is {', '.join(QUANTIZED)}, i16, u16")
    scales, zeros = _parameters(b, node, x, scale, zero)
    if kind in QUANTIZED:
        return b.op(ops.Quantize, x, scales, zero=zeros, dtype=kind)
    _without_blocks(node, x)
    codes = b.op(ops.Div, b.cast(x, "f32"), b.cast(b.entry(scales), "f32"))
    codes = b.op(ops.Round, codes)
    if zeros is not None:
        codes = b.op(ops.Add, codes, b.cast(b.entry(zeros), "f32"))
    low, high = map(float, integer_range(kind))
    return b.cast(b.op(ops.Clip, codes, low=low, high=high), kind)


def _without_blocks(node: Node, x: Entry) -> None:
    if node.integer("block_size", 0):
        raise Error(f"{node.kind} of {x.dtype} with blocks; blocks need codes of 8 or 4 bits")


def _parameters(
    b: Builder, node: Node, x: Entry, scale: Entry, zero: Entry | None, axis: int = 1
) -> tuple[Value, Value | None]:
    """The scales and the zero points, with all dimensions of x."""
    shape = _scales(node, x, scale, axis)
    if zero is not None and product(zero.shape) != product(scale.shape):
        raise Error(f"{node.kind} has {zero.shape} zero points for {scale.shape} scales")
    scales = b.reshaped(b.get(scale), shape)
    return scales, b.reshaped(b.get(zero), shape) if zero is not None and _moves(zero) else None


def _scales(node: Node, x: Entry, scale: Entry, axis: int) -> Shape:
    """The shape of scales with all dimensions of x."""
    block = node.integer("block_size", 0)
    if scale.shape in ((), (1,)) and not block:
        return (1,) * x.ndim
    axis = node.axis(x.ndim, axis)
    if not block:
        if scale.ndim != 1:
            raise Error(f"{node.kind} has scales of {scale.ndim} dimensions and no block_size")
        return (*(1,) * axis, scale.shape[0], *(1,) * (x.ndim - axis - 1))
    blocks = exact_divide(x.shape[axis], block)
    if blocks is None or scale.shape != (*x.shape[:axis], blocks, *x.shape[axis + 1 :]):
        raise Error(
            f"{node.kind} has scales {list(scale.shape)} for blocks of {block} along axis "
            f"{axis} of {list(x.shape)}; blocks must divide the axis"
        )
    return scale.shape


def _moves(zero: Entry) -> bool:
    """Whether a zero point may differ from 0."""
    content = content_of(zero)
    is_zero = content is not None and not any(content.flat)
    return not (is_float(zero.dtype) or is_zero)


@reads("DynamicQuantizeLinear")
def dynamic_quantize(b: Builder, node: Node) -> Made:
    """Codes of u8 from the range of x and 0, the scale, and the zero point."""
    x, dims = node.input(0), tuple(range(node.input(0).ndim))
    low = b.op(ops.Minimum, b.op(ops.ReduceMin, x, dims=dims), 0)
    high = b.op(ops.Maximum, b.op(ops.ReduceMax, x, dims=dims), 0)
    scale = b.op(ops.Div, b.op(ops.Sub, high, low), 255)
    scale = b.where(b.op(ops.Eq, scale, 0), 1.0, scale)
    zero = b.op(ops.Clip, b.op(ops.Neg, b.op(ops.Div, low, scale)), low=0.0, high=255.0)
    zero = b.cast(b.op(ops.Round, zero), "u8")
    return [_codes(b, node, x, scale, zero), scale, zero]


_CONV = "auto_pad dilations group kernel_shape pads strides"


def _like(kind: str) -> Refusal:
    """Refuses what the operator on numbers refuses."""
    return lambda node: refusal(replace(node, kind=kind, domain="", misuse=None))


def _computed(b: Builder, node: Node, kind: str, inputs: Sequence[Entry | None]) -> Entry:
    """What the standard operator of a kind gives for numbers."""
    like = replace(node, kind=kind, domain="", inputs=list(inputs), outputs=node.outputs[:1])
    first = entries_of(b, TABLE["", kind].rule(b, like))[0]
    assert first is not None
    return first


@reads("MatMulInteger")
@reads("ConvInteger", known=_CONV, refuses=_like("Conv"))
def integer_product(b: Builder, node: Node) -> Made:
    """The exact product of codes less their zero points; a cast of it takes `float_product`."""
    terms = product(node.shaped(1, 1).shape[1:])
    exact = node.kind == "ConvInteger" and isinstance(terms, int) and terms * 255**2 < 2**24
    return b.cast(_integer_product(b, node, "f32" if exact else "f64"), "i32")


def float_product(b: Builder, node: Node) -> Entry:
    """The product of codes in f32, exact where it is below 2**24, else rounded."""
    return _integer_product(b, node, "f32")


def _integer_product(b: Builder, node: Node, dtype: str) -> Entry:
    numbers: list[Entry] = []
    last = -1 if node.kind == "MatMulInteger" else 0
    for i, axis in ((0, -2), (1, last)):
        x, zero = node.shaped(i, 1), node.optional(i + 2)
        if zero is not None and not _moves(zero):
            zero = None
        if dtype == "f32":
            scale = b.entry(
                b.value(ops.Full(value=1.0, shape=zero.shape if zero else (), dtype="f32"))
            )
            numbers.append(_numbers(b, node, x, scale, zero, max(axis, -x.ndim)))
        else:
            wide = b.cast(x, dtype)
            if zero is not None:
                shape = _scales(node, x, zero, max(axis, -x.ndim))
                zeros = b.entry(b.reshaped(b.get(zero), shape))
                wide = b.op(ops.Sub, wide, b.cast(zeros, dtype))
            numbers.append(wide)
    return _computed(b, node, node.kind.removesuffix("Integer"), numbers)


@reads("QLinearMatMul")
@reads("QLinearMatMul", domain=MICROSOFT)
@reads("QLinearConv", known=_CONV, refuses=_like("Conv"))
@reads("QGemm", domain=MICROSOFT, known="alpha transA transB")
def quantized_product(b: Builder, node: Node) -> Made:
    """The product of two tensors of codes and a bias of i32, in codes, or in f32 without scale."""
    kind = node.kind.removeprefix("QLinear").removeprefix("Q")
    rows = -1 if kind == "MatMul" or (kind == "Gemm" and not node.integer("transB", 0)) else 0
    given = [node.optional(i) for i in range(9)]
    if kind == "Gemm":  # the bias stands before the scale of the result
        given = [*given[:6], *given[7:9], given[6]]
    numbers: list[Entry | None] = []
    for at, axis in ((0, -2), (3, rows)):
        x, scale = node.shaped(at, 1), node.input(at + 1)
        numbers.append(_numbers(b, node, x, scale, given[at + 2], max(axis, -x.ndim)))
    if given[8] is not None:
        factor = b.op(ops.Mul, node.input(4), b.get(node.input(1)))
        if factor.ndim > 1 or node.real("alpha", 1.0) != 1:
            raise Error(f"{node.kind} with a bias and an alpha, or scales of several dimensions")
        numbers.append(_numbers(b, node, given[8], factor, None, 0))
    result = _computed(b, node, kind, numbers)
    return result if given[6] is None else _codes(b, node, result, given[6], given[7])


@reads("QLinearAdd", "QLinearMul", domain=MICROSOFT)
@reads("QLinearSigmoid", domain=MICROSOFT)
@reads("QLinearLeakyRelu", domain=MICROSOFT, known="alpha")
@reads(
    "QLinearGlobalAveragePool",
    domain=MICROSOFT,
    known="channels_last",
    refuses=only("channels_last", 0),
)
def quantized_elements(b: Builder, node: Node) -> Made:
    """An operator on one or two tensors of codes, in codes."""
    count = 2 if node.kind in ("QLinearAdd", "QLinearMul") else 1
    many = [
        _numbers(b, node, node.input(i), node.input(i + 1), node.optional(i + 2))
        for i in range(0, 3 * count, 3)
    ]
    result = _computed(b, node, node.kind.removeprefix("QLinear"), many)
    return _codes(b, node, result, node.input(3 * count), node.optional(3 * count + 1))
