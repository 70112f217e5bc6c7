"""Quantized weights and activations for TensorRT, in the forms that its builder fuses.

Scales of activations are constants, in the dtype of the result: with computed ones the builder
multiplies in f16. Scales per token are applied outside: x is divided by them before it is
quantized with the scale 1, and the product is multiplied by them.
"""

from __future__ import annotations

import numpy as np

from irc import ops
from irc.backends.onnx.emitter import Flat, Later, Lowered
from irc.backends.onnx.graph import DTYPES
from irc.backends.onnx.lower_quantized import dequantized, in_blocks, per_index, scales_refusal
from irc.backends.tensorrt.lowering.emitter import NARROW_ALIGNMENT, TensorRTEmitter, is_odd
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.backends.tensorrt.target import BUILDER
from irc.errors import Error
from irc.ir.core import Op, Value, Weight
from irc.ir.dims import Shape, product
from irc.ir.dtypes import numpy_dtype
from irc.ops.quant import QuantizedOp, block_sizes

NARROW = ("i4", "f8e4m3", "f4e2m1", "f8e8m0")
_DYNAMIC = {  # by the dtypes of scales and codes: the node, and how many codes share a scale
    ("f8e4m3", "f4e2m1"): ("trt::TRT_FP4DynamicQuantize", 16),
    ("f8e8m0", "f8e4m3"): ("trt::TRT_MXFP8DynamicQuantize", 32),
}


def _dynamic_node(op: Op | None) -> tuple[str, int] | None:
    """The node that computes scales and codes at once."""
    if not isinstance(op, ops.DynamicScale):
        return None
    node = _DYNAMIC.get((op.scale, op.dtype))
    return node if node is not None and node[1] == op.block else None


def _source(scale: Value) -> Op | None:
    """What computes scales, behind the second level that multiplies them."""
    producer = scale.producer
    if isinstance(producer, ops.Dequantize) and producer.x.type.dtype == "f8e4m3":
        producer = producer.x.producer
    return producer


def _quantizer(codes: Value) -> Op | None:
    """What computes codes, which may have come from other ranks."""
    producer = codes.producer
    while isinstance(producer, ops.AllGather):
        producer = producer.x.producer
    return producer


def _is_number(value: Value) -> bool:
    """Whether a value is one number that is known now."""
    is_known = isinstance(value, Weight) or isinstance(value.producer, (ops.Full, ops.Constant))
    return is_known and product(value.type.shape) == 1


def _number(e: TensorRTEmitter, value: Value, dtype: str) -> str:
    """One number as a constant of the graph."""
    root = e.root(value)
    producer = root.producer
    if isinstance(root, Weight):
        numbers = e.storage.reader.read(root)
    else:
        assert isinstance(producer, (ops.Full, ops.Constant))
        numbers = producer.evaluate()
    number = float(np.asarray(numbers).astype(np.float32).reshape(-1)[0])
    if dtype == "f16" and number < 2.0**-14:
        raise Error(f"the scale {number:.3g} is too small for f16; compile with --dtype bf16")
    return e.graph.constant(np.asarray(number).astype(numpy_dtype(dtype)))


def _per_token(op: QuantizedOp) -> bool:
    """Whether each row of x has a scale of its own."""
    shape = op.scale.type.shape
    return shape[-1] == 1 and shape[:-1] == op.x.type.shape[:-1]


def _quantize_refusal(op: Op) -> str | None:
    assert isinstance(op, ops.Quantize)
    if op.zero is not None:
        return "has zero points, and TensorRT's scales are symmetric"
    if op.dtype not in ("i8", "f8e4m3") and _dynamic_node(_source(op.scale)) is None:
        return f"makes {op.dtype}, and TensorRT quantizes to i8, f8e4m3, and f4e2m1 of NVFP4"
    return None


@CHOICES.lower(
    ops.DynamicScale,
    choice="TRT_FP4DynamicQuantize, TRT_MXFP8DynamicQuantize",
    reason="scales and codes of NVFP4 and MXFP8 in one kernel; other scales are computed in parts",
    source=BUILDER,
    unless=lambda op: None if _dynamic_node(op) else "has other scales than NVFP4 and MXFP8",
    takes=NARROW,
)
def dynamic_scale(e: TensorRTEmitter, op: ops.DynamicScale) -> Lowered:
    """The scales; the codes that belong to them are kept for `quantize`."""
    node = _dynamic_node(op)
    assert node is not None
    kind, block = node
    inputs = [e.flat(op.x)]
    if op.tensor_scale is not None:
        inputs.append(_number(e, op.tensor_scale, "f32"))
    types = {"scale_type" if op.tensor_scale is not None else "output_dtype": DTYPES["f8e4m3"]}
    codes, scales = e.graph.several(2, kind, *inputs, axis=-1, block_size=block, **types)
    e.codes[op] = codes
    return Flat(scales)


@CHOICES.lower(
    ops.Quantize,
    choice="QuantizeLinear",
    reason="with a constant scale; by computed ones x is divided first, since the builder "
    "multiplies in f16 what has computed scales",
    source=BUILDER,
    unless=_quantize_refusal,
    takes=NARROW,
)
def quantize(e: TensorRTEmitter, op: ops.Quantize) -> Lowered:
    """The codes of x as a matrix."""
    producer = _source(op.scale)
    if _dynamic_node(producer) is not None and producer in e.codes:
        return Flat(e.codes[producer])
    to, dtype = {"output_dtype": DTYPES[op.dtype]}, op.x.type.dtype
    if _is_number(op.scale):
        return Flat(e.add("QuantizeLinear", e.flat(op.x), _number(e, op.scale, dtype), **to))
    divided = _scaled(e, "Div", op, e.flat(op.x), dtype)
    return Flat(e.add("QuantizeLinear", divided, e.number(1, "f32"), **to))


def _scaled(e: TensorRTEmitter, kind: str, op: QuantizedOp, x: str, dtype: str) -> str:
    """A matrix x with every block multiplied or divided by its scale, in f32."""
    shape, scales = op.x.type.shape, op.scale.type.shape
    blocks, factors = zip(*map(_apart, shape, scales), strict=True)
    scale = e.converted(op.scale, "f32")
    flat = (product(shape[:-1]), shape[-1])
    x = e.reshape(x if dtype == "f32" else e.cast(x, "f32"), sum(blocks, ()))
    return e.reshape(e.add(kind, x, e.reshape(scale, sum(factors, ()))), flat)


def _apart(size: object, scales: object) -> tuple[Shape, Shape]:
    """A dimension in blocks as two, of x and of its scales."""
    if scales in (1, size):
        return (size,), (scales,)  # type: ignore[return-value]
    return (scales, int(str(size)) // int(str(scales))), (scales, 1)  # type: ignore[return-value]


def _refusal(op: Op) -> str | None:
    """Refuses zero points, and narrow codes that are no constants."""
    assert isinstance(op, ops.Dequantize)
    kind, producer = op.x.type.dtype, _quantizer(op.x)
    if op.zero is not None:
        return "has zero points, and TensorRT's scales are symmetric; center the values at 0"
    if kind == "i4" and not isinstance(op.x, Weight):
        return "takes i4 that is not a weight, and TensorRT has i4 in constants only"
    if isinstance(producer, (ops.Quantize, ops.DynamicScale)) or _in_squares(op):
        return None
    return scales_refusal(op)


def _in_squares(op: ops.Dequantize) -> bool:
    """Whether a matrix of f8e4m3 has blocks along both dimensions."""
    sizes = block_sizes(op.x.type.shape, op.scale.type.shape)
    is_whole = product(op.scale.type.shape) == 1
    return op.x.type.dtype == "f8e4m3" and len(sizes) == 2 and 1 not in sizes and not is_whole


def _cannot_cast(op: Op) -> bool:
    """Whether the expansion, which casts x, is no alternative: TensorRT cannot cast these."""
    return isinstance(op.operands[0], Weight) or op.operands[0].type.dtype != "i8"


@CHOICES.lower(
    ops.Dequantize,
    choice="DequantizeLinear",
    reason="one kernel with the product behind it, for blocks of i4 constants along the sum, for a "
    "scale per tensor or row of i8 and f8e4m3, for f4e2m1 by inputs in NVFP4 and for f8e4m3 with "
    "f8e8m0; a kernel of its own at every step for other weights of f4e2m1 and f8e4m3",
    source=BUILDER,
    unless=_refusal,
    takes=NARROW,
    alone=_cannot_cast,
)
def dequantize(e: TensorRTEmitter, op: ops.Dequantize) -> Lowered:
    """The numbers; nothing where all that follows reads codes and scales."""
    producer = _quantizer(op.x)
    if any(isinstance(user, QuantizedOp) and user.scale is op.result for user in op.result.users):
        return Later(lambda: _level(e, op, op.result.type.dtype))
    if _is_transposed(op):
        return Later(lambda: dequantized(e, op))
    if isinstance(producer, ops.Quantize):
        return Later(lambda: e.reshape(_activation(e, op, producer), op.x.type.shape))
    if _blocks_of_columns(op):
        return _turned(e, op, op.result.type.dtype)
    if op.scale.type.dtype == "f8e8m0" and op.x.type.dtype == "f8e4m3":
        return _mxfp8(e, op.result.type.dtype, e.get(op.x), _exponents(e, op.scale))
    if _in_squares(op):
        block = [int(str(size)) for size in block_sizes(op.x.type.shape, op.scale.type.shape)]
        to = {"block_shape": block, "output_dtype": DTYPES[op.result.type.dtype]}
        return e.add(
            "trt::TRT_BlockDequantize", e.get(op.x), _scales(e, op, op.result.type.dtype), **to
        )
    if op.x.type.dtype == "f4e2m1":
        *_, size = block_sizes(op.x.type.shape, op.scale.type.shape)
        scales, block = _scales(e, op, op.result.type.dtype), int(str(size))
        return e.add("DequantizeLinear", e.get(op.x), scales, axis=-1, block_size=block)
    return _padded(e, op)


def _blocks_of_columns(op: ops.Dequantize) -> bool:
    """Whether a weight [K, N] has blocks along K, which TensorRT takes along the last dimension."""
    blocked = op.x.type.dtype == "f4e2m1" or op.scale.type.dtype == "f8e8m0"
    if not blocked or not isinstance(op.x, Weight) or op.x.type.ndim != 2:
        return False
    return isinstance(_stored_scale(op), Weight) and op.scale.type.shape[0] != op.x.type.shape[0]


def _stored_scale(op: ops.Dequantize) -> Value:
    """The scales of a weight as the checkpoint has them: codes, where they have a scale."""
    level = op.scale.producer
    return level.x if isinstance(level, ops.Dequantize) else op.scale


def _turned(e: TensorRTEmitter, op: ops.Dequantize, dtype: str) -> str:
    """The numbers of a weight whose codes and scales are stored transposed."""
    scale, level = _stored_scale(op), op.scale.producer
    assert isinstance(op.x, Weight) and isinstance(scale, Weight)
    codes = e.stored_transposed(op.x)
    if scale.type.dtype == "f8e8m0" and op.x.type.dtype == "f8e4m3":
        numbers = _mxfp8(e, dtype, codes, e.stored_transposed(scale, "u8"))
        return e.add("Transpose", numbers, perm=[1, 0])
    if isinstance(level, ops.Dequantize):
        factor, to = _number(e, level.scale, "f32"), {"output_dtype": DTYPES[dtype]}
        scales = e.add("DequantizeLinear", e.stored_transposed(scale), factor, **to)
    else:
        scales = e.stored_transposed(scale, dtype)
    block = int(str(block_sizes(op.x.type.shape, op.scale.type.shape)[0]))
    numbers = e.add("DequantizeLinear", codes, scales, axis=-1, block_size=block)
    return e.add("Transpose", numbers, perm=[1, 0])


def _scales(e: TensorRTEmitter, op: QuantizedOp, dtype: str) -> str:
    """Scales in the dtype of the numbers, which is what TensorRT takes."""
    producer = op.scale.producer
    if isinstance(producer, ops.Dequantize):
        return _level(e, producer, dtype)
    weight = e.weight(op.scale)
    return e.converted(op.scale, dtype) if weight is None else e.stored_as(weight, dtype)


def _level(e: TensorRTEmitter, op: ops.Dequantize, dtype: str) -> str:
    """Scales of f8e4m3 times their own scale, in a dtype."""
    producer = op.x.producer
    x = e.flat(op.x) if isinstance(producer, ops.DynamicScale) else e.get(op.x)
    factor = _number(e, op.scale, "f32") if _is_number(op.scale) else e.get(op.scale)
    return e.add("DequantizeLinear", x, factor, output_dtype=DTYPES[dtype])


def _exponents(e: TensorRTEmitter, scale: Value) -> str:
    """Scales of f8e8m0; constants as u8, which is how the parser takes them."""
    weight = e.weight(scale)
    return e.flat(scale) if weight is None else e.stored_as(weight, "u8")


def _mxfp8(e: TensorRTEmitter, dtype: str, x: str, scales: str) -> str:
    kind, to = "trt::TRT_MXFP8DequantizeLinear", DTYPES[dtype]
    return e.add(kind, x, scales, axis=-1, block_size=32, output_dtype=to)


def _activation(
    e: TensorRTEmitter, op: ops.Dequantize, producer: ops.Quantize, dtype: str = ""
) -> str:
    """A quantized value as numbers in a matrix, by default in the dtype of the result."""
    dtype, x = dtype or op.result.type.dtype, e.flat(op.x)
    node = _dynamic_node(_source(producer.scale))
    if node is not None and op.scale.type.dtype == "f8e8m0":
        return _mxfp8(e, dtype, x, _exponents(e, op.scale))
    if node is not None:
        scales = _scales(e, op, dtype)
        return e.add("DequantizeLinear", x, scales, axis=-1, block_size=node[1])
    if _is_number(op.scale):
        return e.add("DequantizeLinear", x, _number(e, op.scale, dtype))
    numbers = _scaled(e, "Mul", op, e.add("DequantizeLinear", x, e.number(1, "f32")), "f32")
    return numbers if dtype == "f32" else e.cast(numbers, dtype)


def _is_transposed(op: Op | None) -> bool:
    """Whether products read the transpose of a weight of i4: builds take less memory then."""
    if not isinstance(op, ops.Dequantize) or not isinstance(op.x, Weight):
        return False
    same = op.scale.type.dtype == op.result.type.dtype and isinstance(op.scale, Weight)
    blocks = in_blocks(op) if op.x.type.ndim == 2 and same else None
    return op.x.type.dtype == "i4" and blocks is not None and blocks[0] == 1


def transposed_weight(e: TensorRTEmitter, weight: Value) -> str | None:
    """A dequantized weight [K, N] of a product, where it is stored so."""
    op = e.root(weight).producer
    if not isinstance(op, ops.Dequantize) or not _is_transposed(op):
        return None
    _, size = block_sizes(op.x.type.shape, op.scale.type.shape)

    def make() -> str:
        assert isinstance(op.x, Weight) and isinstance(op.scale, Weight)
        codes, scales = e.stored_transposed(op.x), e.stored_transposed(op.scale)
        return e.add("DequantizeLinear", codes, scales, axis=0, block_size=int(str(size)))

    return e.cached(("transposed", op), make)


def product_input(e: TensorRTEmitter, x: Value, weight: Value) -> tuple[str, Value | None]:
    """(x as a matrix for a product, the scales per token that the product is multiplied by).

    Codes are widened first where those of the weight have another dtype, or several scales in a
    row: the builder has no kernel for both and fails.
    """
    op = e.root(x).producer
    producer = _quantizer(op.x) if isinstance(op, ops.Dequantize) else None
    if not isinstance(op, ops.Dequantize) or not isinstance(producer, ops.Quantize):
        return e.flat(x), None
    codes = e.root(weight).producer
    if not isinstance(codes, ops.Dequantize) or _differ(codes, op, producer):
        return e.cached(("wide", op), lambda: _widened(e, op, producer)), None
    if _is_number(op.scale) or _dynamic_node(_source(producer.scale)) or not _per_token(op):
        return e.cached(("numbers", op), lambda: _activation(e, op, producer)), None
    one = e.number(1, x.type.dtype)
    numbers = e.cached(("codes", op), lambda: e.add("DequantizeLinear", e.flat(op.x), one))
    return numbers, op.scale


def _differ(weight: ops.Dequantize, x: ops.Dequantize, producer: ops.Quantize) -> bool:
    """Whether codes of a weight have another dtype than those of x, or blocks where x has none."""
    has_blocks = per_index(weight) is None and not _in_squares(weight)
    is_whole = x.scale.type.shape[-1] == 1
    eight_bits = producer.dtype in ("i8", "f8e4m3")
    return weight.x.type.dtype != producer.dtype or (eight_bits and has_blocks and is_whole)


def _widened(e: TensorRTEmitter, op: ops.Dequantize, producer: ops.Quantize) -> str:
    """A quantized value as numbers that do not fuse with a product, because of the Max."""
    lowest = e.number(-1e38 if op.result.type.dtype != "f16" else -65504.0, op.result.type.dtype)
    return e.add("Max", _activation(e, op, producer), lowest)


def scaled_rows(e: TensorRTEmitter, y: str, scale: Value, dtype: str) -> str:
    """A product of codes, times the scales of its rows."""
    wide = y if dtype == "f32" else e.cast(y, "f32")
    factors = e.reshape(e.converted(scale, "f32"), (product(scale.type.shape), 1))
    y = e.add("Mul", wide, factors)
    return y if dtype == "f32" else e.cast(y, dtype)


def _padded(e: TensorRTEmitter, op: ops.Dequantize) -> str:
    """DequantizeLinear; with padding behind odd sizes of what only products read.

    Scales of weights are converted to the dtype of the numbers: kernels take one dtype of scales.
    """
    x, scale, dim = e.weight(op.x), e.weight(op.scale), per_index(op)
    if x is not None and scale is not None and scale.type.dtype != op.result.type.dtype:
        return dequantized(e, op, _scales(e, op, op.result.type.dtype))
    is_weight = all(isinstance(u, ops.Linear) and u.x is not op.result for u in op.result.users)
    if x is None or scale is None or dim not in (-1, 0) or not is_weight or not is_odd(x):
        return dequantized(e, op)
    if x.type.dtype not in ("i8", "f8e4m3") or x.type.ndim != 2:
        return dequantized(e, op)
    stored, shape = e.aligned(x, NARROW_ALIGNMENT)
    if dim < 0:
        factors = e.add("Reshape", e.get(op.scale), e.shape(()))
        return e.padded_as(op.result, e.add("DequantizeLinear", stored, factors), shape)
    factors, sizes = e.aligned(scale, NARROW_ALIGNMENT, repeat=True)
    factors = e.add("Reshape", factors, e.ints(sizes[0]))
    return e.padded_as(op.result, e.add("DequantizeLinear", stored, factors, axis=0), shape)
