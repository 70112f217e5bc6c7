"""Quantized tensors: QuantizeLinear, DequantizeLinear, and what is defined by them.

Operators on codes (QLinearMatMul, MatMulInteger, ...) become the operator on the numbers that the
codes stand for, between DequantizeLinear and QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, ImportedValue, Node
from irc.frontends.onnx.files import DTYPES
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.rules import MICROSOFT, Refusal, Results, computed, imports, only, refusal
from irc.ir.dims import Shape, exact_divide, product
from irc.ir.dtypes import integer_range, is_float
from irc.ops.quant import QUANTIZED

_WIDE = ("i16", "u16", "i32")  # codes that dequantize and quantize of irc do not have
_LINEAR = "axis block_size output_dtype"


class _Quantized(NamedTuple):
    """A tensor of codes, or one to be quantized, with its scales and zero points."""

    x: ImportedValue
    scale: ImportedValue
    zero: ImportedValue | None


def _operands(node: Node, at: int = 0) -> _Quantized:
    """Three inputs of a node."""
    return _Quantized(node.input(at), node.input(at + 1), node.optional(at + 2))


@imports("DequantizeLinear", domain=MICROSOFT, attributes="axis")
@imports("DequantizeLinear", attributes=_LINEAR)
def dequantize(b: Builder, node: Node) -> Results:
    """Scales for all elements, per index of an axis, or per block along it."""
    return _numbers(b, node, _operands(node), dtype=DTYPES.get(node.integer("output_dtype", 0), ""))


@imports("QuantizeLinear", domain=MICROSOFT, attributes="axis")
@imports("QuantizeLinear", attributes=f"{_LINEAR} precision saturate", refuses=only("saturate", 1))
def quantize(b: Builder, node: Node) -> Results:
    """Codes of the dtype of the zero point, else of `output_dtype`, else u8."""
    return _codes(b, node, _operands(node), DTYPES.get(node.integer("output_dtype", 0), "u8"))


def _numbers(
    b: Builder, node: Node, codes: _Quantized, axis: int = 1, dtype: str = ""
) -> ImportedValue:
    """The numbers that codes stand for, by default in the dtype of the scales."""
    dtype, x = dtype or codes.scale.dtype, codes.x
    scale, zero = _parameters(b, node, codes, axis)
    if x.dtype not in _WIDE:
        return b.op(ops.Dequantize, x, scale, zero=zero, dtype=dtype)
    _check_no_blocks(node, x)
    wide = b.cast(x, "f32")
    wide = wide if zero is None else wide - b.cast(zero, "f32")
    return b.cast(wide * b.cast(scale, "f32"), dtype)


def _codes(b: Builder, node: Node, numbers: _Quantized, dtype: str = "u8") -> ImportedValue:
    """x / scale + zero, rounded and saturated, in the dtype of zero, or else of this one."""
    x, dtype = numbers.x, dtype if numbers.zero is None else numbers.zero.dtype
    if dtype not in (*QUANTIZED, "i16", "u16"):
        raise Error(f"{node.kind} makes {dtype}; there is {', '.join(QUANTIZED)}, i16, u16")
    scale, zero = _parameters(b, node, numbers)
    if dtype in QUANTIZED:
        return b.op(ops.Quantize, x, scale, zero=zero, dtype=dtype)
    _check_no_blocks(node, x)
    codes = b.op(ops.Round, b.cast(x, "f32") / b.cast(scale, "f32"))
    codes = codes if zero is None else codes + b.cast(zero, "f32")
    low, high = map(float, integer_range(dtype))
    return b.cast(b.op(ops.Clip, codes, low=low, high=high), dtype)


def _check_no_blocks(node: Node, x: ImportedValue) -> None:
    if node.integer("block_size", 0):
        raise Error(f"{node.kind} of {x.dtype} with blocks; blocks need codes of 8 or 4 bits")


def _parameters(
    b: Builder, node: Node, tensor: _Quantized, axis: int = 1
) -> tuple[ImportedValue, ImportedValue | None]:
    """The scales and the zero points, with all dimensions of x."""
    x, scale, zero = tensor
    shape = _scales(node, x, scale, axis)
    if zero is not None and product(zero.shape) != product(scale.shape):
        raise Error(f"{node.kind} has {zero.shape} zero points for {scale.shape} scales")
    zero = b.reshaped(zero, shape) if zero is not None and _moves(zero) else None
    return b.reshaped(scale, shape), zero


def _scales(node: Node, x: ImportedValue, scale: ImportedValue, axis: int) -> Shape:
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


def _moves(zero: ImportedValue) -> bool:
    """Whether a zero point may differ from 0."""
    content = content_of(zero)
    is_zero = content is not None and not any(content.flat)
    return not (is_float(zero.dtype) or is_zero)


@imports("DynamicQuantizeLinear")
def dynamic_quantize(b: Builder, node: Node) -> Results:
    """Codes of u8 from the range of x and 0, the scale, and the zero point."""
    x, dims = node.input(0), tuple(range(node.input(0).ndim))
    low = b.op(ops.Minimum, b.op(ops.ReduceMin, x, dims=dims), 0)
    high = b.op(ops.Maximum, b.op(ops.ReduceMax, x, dims=dims), 0)
    scale = (high - low) / 255
    scale = b.where(b.op(ops.Eq, scale, 0), 1.0, scale)
    zero = b.op(ops.Clip, -(low / scale), low=0.0, high=255.0)
    zero = b.cast(b.op(ops.Round, zero), "u8")
    return [_codes(b, node, _Quantized(x, scale, zero)), scale, zero]


_CONV = "auto_pad dilations group kernel_shape pads strides"


def _like(kind: str) -> Refusal:
    """Refuses what the operator on numbers refuses."""
    return lambda node: refusal(replace(node, kind=kind, domain="", misuse=None))


def _of_numbers(
    b: Builder, node: Node, kind: str, inputs: Sequence[ImportedValue | None]
) -> ImportedValue:
    """What the standard operator of a kind gives for numbers."""
    like = replace(node, kind=kind, domain="", inputs=list(inputs), outputs=node.outputs[:1])
    first = computed(b, like)[0]
    assert first is not None
    return first


@imports("MatMulInteger")
@imports("ConvInteger", attributes=_CONV, refuses=_like("Conv"))
def integer_product(b: Builder, node: Node) -> Results:
    """The exact product of codes less their zero points; a cast of it takes `float_product`."""
    terms = product(node.shaped(1, 1).shape[1:])
    exact = node.kind == "ConvInteger" and isinstance(terms, int) and terms * 255**2 < 2**24
    return b.cast(_integer_product(b, node, "f32" if exact else "f64"), "i32")


def float_product(b: Builder, node: Node) -> ImportedValue:
    """The product of codes in f32, exact where it is below 2**24, else rounded."""
    return _integer_product(b, node, "f32")


def _integer_product(b: Builder, node: Node, dtype: str) -> ImportedValue:
    numbers: list[ImportedValue] = []
    for i, axis in ((0, -2), (1, -1 if node.kind == "MatMulInteger" else 0)):
        x, zero = node.shaped(i, 1), node.optional(i + 2)
        zero = zero if zero is not None and _moves(zero) else None
        axis = max(axis, -x.ndim)
        if dtype == "f32":
            shape = () if zero is None else zero.shape
            scale = b.op(ops.Full, value=1.0, shape=shape, dtype="f32")
            numbers.append(_numbers(b, node, _Quantized(x, scale, zero), axis))
            continue
        wide = b.cast(x, dtype)
        if zero is not None:
            zeros = b.reshaped(zero, _scales(node, x, zero, axis))
            wide = wide - b.cast(zeros, dtype)
        numbers.append(wide)
    return _of_numbers(b, node, node.kind.removesuffix("Integer"), numbers)


@imports("QLinearMatMul")
@imports("QLinearMatMul", domain=MICROSOFT)
@imports("QLinearConv", attributes=_CONV, refuses=_like("Conv"))
@imports("QGemm", domain=MICROSOFT, attributes="alpha transA transB")
def quantized_product(b: Builder, node: Node) -> Results:
    """The product of two tensors of codes and a bias of i32, in codes, or in f32 without scale."""
    kind = node.kind.removeprefix("QLinear").removeprefix("Q")
    rows = -1 if kind == "MatMul" or (kind == "Gemm" and not node.integer("transB", 0)) else 0
    scale, zero, bias = (node.optional(i) for i in ((7, 8, 6) if kind == "Gemm" else (6, 7, 8)))
    numbers: list[ImportedValue | None] = []
    for i, axis in ((0, -2), (3, rows)):
        axis = max(axis, -node.shaped(i, 1).ndim)
        numbers.append(_numbers(b, node, _operands(node, i), axis))
    if bias is not None:
        factor = node.input(4) * node.input(1)
        if factor.ndim > 1 or node.real("alpha", 1.0) != 1:
            raise Error(f"{node.kind} with a bias and an alpha, or scales of several dimensions")
        numbers.append(_numbers(b, node, _Quantized(bias, factor, None), 0))
    result = _of_numbers(b, node, kind, numbers)
    return result if scale is None else _codes(b, node, _Quantized(result, scale, zero))


@imports("QLinearAdd", "QLinearMul", "QLinearSigmoid", domain=MICROSOFT)
@imports("QLinearLeakyRelu", domain=MICROSOFT, attributes="alpha")
@imports(
    "QLinearGlobalAveragePool",
    domain=MICROSOFT,
    attributes="channels_last",
    refuses=only("channels_last", 0),
)
def quantized_elements(b: Builder, node: Node) -> Results:
    """An operator on one or two tensors of codes, in codes."""
    count = 2 if node.kind in ("QLinearAdd", "QLinearMul") else 1
    numbers = [_numbers(b, node, _operands(node, i)) for i in range(0, 3 * count, 3)]
    result = _of_numbers(b, node, node.kind.removeprefix("QLinear"), numbers)
    scale, zero = node.input(3 * count), node.optional(3 * count + 1)
    return _codes(b, node, _Quantized(result, scale, zero))
