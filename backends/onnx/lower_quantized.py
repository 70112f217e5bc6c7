"""Quantized tensors as ONNX nodes, and their products as MatMulNBits of ONNX Runtime.

MatMulNBits reads weights in 4 or 8 bits; DequantizeLinear in front of a product widens all of them
at every run. Milliseconds of one thread for a product with [8192, 2048] of 1 and of 128 rows, and
the error relative to f32 (ONNX Runtime 1.32, AVX-512 VNNI, blocks of 128):

| weights | nodes | 1 row | 128 rows | error |
|---|---|---|---|---|
| f32 | Gemm | 2.2 | 22 | 3e-7 |
| 4 bits | DequantizeLinear, Gemm | 20 | 48 | 3e-7 |
| 4 bits | MatMulNBits, accuracy level 1: activations in f32 | 0.8 | 21 | 8e-7 |
| 4 bits | MatMulNBits, accuracy level 4: activations rounded to 8 bits | 0.4 | 12 | 6e-3 |
| 4 bits | the same, of both parts of the activations (`_in_two_parts`) | 0.4 | 24 | 3e-5 |
| 8 bits | MatMulNBits, accuracy level 1 | 79 | 99 | 3e-7 |
| 8 bits | MatMulNBits, accuracy level 4, of both parts | 0.7 | 23 | 3e-5 |
| 8 bits, activations of 8 bits | QGemm | 5.6 | 26 | 3e-7 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from onnx.onnx_ml_pb2 import TensorProto

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Later, Lowered
from irc.backends.onnx.graph import DTYPES
from irc.backends.onnx.lower_matrix import linear as plain_linear
from irc.ir.core import Op, Value, Weight
from irc.ir.dims import Shape
from irc.ir.dtypes import dtype, is_float, numpy_dtype
from irc.ops.collective import Collective
from irc.ops.quant import QuantizedOp, block_sizes
from irc.quantization.packing import words_shape
from irc.weights import Ref, UnboundRef, UnpackedRef, is_computed

_BLOCKS = (128, 64, 32, 16)  # sizes of blocks, powers of two, which MatMulNBits needs
_OFFSETS = {"i4": 8, "u4": 0, "i8": 128, "u8": 0, "f4e2m1": 128}  # of its codes, which are unsigned
_SIGNS = {"i4": 0x88, "i8": 0x80}  # the highest bits of the codes in a byte
_WORDS = "columns"  # how codes with these bits inverted are packed, in words of 32 bits
_INTEGERS = 4  # the accuracy level of activations that are rounded to 8 bits


@dataclass(frozen=True)
class Packed:
    """A weight [N, K] in blocks of `size` along K, which MatMulNBits multiplies."""

    op: ops.Dequantize
    weight: Weight
    size: int

    @property
    def bits(self) -> int:
        return 4 if self.weight.type.dtype in ("i4", "u4") else 8

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K / size]."""
        rows, columns = (int(str(size)) for size in self.weight.type.shape)
        return rows, columns // self.size


def packed(op: Op | None) -> Packed | None:
    """The weight that an operation dequantizes; None where MatMulNBits does not fit."""
    if not isinstance(op, ops.Dequantize) or not isinstance(op.x, Weight) or op.x.type.ndim != 2:
        return None
    if not all(map(_is_constant, op.operands)):
        return None
    _, along = block_sizes(op.x.type.shape, op.scale.type.shape)
    sizes = (size for size in _BLOCKS if isinstance(along, int) and along and along % size == 0)
    size = next(sizes, None)
    return Packed(op, op.x, size) if size is not None and op.x.type.dtype in _OFFSETS else None


def _is_constant(value: Value) -> bool:
    """Whether a value is made of weights alone: MatMulNBits computes wrongly with other scales."""
    op = value.producer
    if op is None or isinstance(op, Collective):
        return isinstance(value, Weight)
    return all(map(_is_constant, op.operands))


@TABLE.lower(ops.Linear)
def linear(e: Emitter, op: ops.Linear) -> Lowered:
    """MatMulNBits with a quantized weight, else Gemm."""
    packing = packed(e.root(op.weight).producer)
    if packing is None:
        return plain_linear(e, op)
    x = _rounded_by_the_product(e, op, packing)
    rows = e.flat(op.x if x is None else x)
    product = e.add(
        "com.microsoft::MatMulNBits",
        _in_two_parts(e, rows, op.x.type.shape, packing.size) if x is None else rows,
        *e.cached((packing.op, "packed"), lambda: _stored(e, packing)),
        N=packing.shape[0],
        K=packing.shape[1] * packing.size,
        bits=packing.bits,
        block_size=packing.size,
        accuracy_level=_INTEGERS,
    )
    if x is None:
        product = e.add("Add", *e.graph.several(2, "Split", product, axis=0, num_outputs=2))
    product = e.add("Add", product, _nan_rows(e, rows))
    return Flat(product if op.bias is None else e.add("Add", product, e.get(op.bias)))


def _nan_rows(e: Emitter, rows: str) -> str:
    """[M, 1]: NaN for the rows [M, K] with NaN or infinities, else 0; MatMulNBits ignores NaN."""

    def make() -> str:
        return e.add("ReduceSum", e.add("Mul", rows, e.number(0, "f32")), e.ints(-1))

    return e.cached(("nan rows", rows), make)


def _rounded_by_the_product(e: Emitter, op: ops.Linear, packing: Packed) -> Value | None:
    """The value that MatMulNBits rounds to 8 bits in blocks, where no more precision is wanted.

    The module rounds it so. Or it is bf16, which has 8 bits itself, is not rounded in another way,
    and the module has weights of 4 bits, whose own rounding is 16 times as coarse.
    """
    if isinstance(e.root(op.x).producer, ops.Dequantize):
        return _before_rounding(e, op.x, packing.size)
    coarse = any(weight.type.dtype in ("i4", "u4") for weight in e.module.weights.values())
    return op.x if coarse and op.x.type.dtype == "bf16" else None


def _before_rounding(e: Emitter, x: Value, size: int) -> Value | None:
    """The value that x rounds to 8 bits in blocks of `size`, which MatMulNBits does itself."""
    op = e.root(x).producer
    if not isinstance(op, ops.Dequantize) or not _rounds_in_blocks(op, e.root):
        return None
    codes, scale = e.root(op.x).producer, e.root(op.scale).producer
    assert isinstance(codes, ops.Quantize) and isinstance(scale, ops.DynamicScale)
    same = e.root(codes.scale) is e.root(op.scale) and e.root(scale.x) is e.root(codes.x)
    return codes.x if same and scale.block == size else None


def _rounds_in_blocks(op: Op, root: Callable[[Value], Value] = lambda value: value) -> bool:
    """Whether an operation belongs to the rounding of a value to i8 in blocks, with f32 scales."""
    if isinstance(op, ops.DynamicScale):
        return (op.dtype, op.scale) == ("i8", "f32") and op.block in _BLOCKS
    if isinstance(op, ops.Dequantize):
        codes = root(op.x).producer
        return isinstance(codes, ops.Quantize) and _rounds_in_blocks(codes, root)
    scale = root(op.scale).producer if isinstance(op, ops.Quantize) and op.zero is None else None
    return isinstance(scale, ops.DynamicScale) and _rounds_in_blocks(scale, root)


def _in_two_parts(e: Emitter, x: str, shape: Shape, size: int) -> str:
    """Rows x [M, K] as [2 M, K]: x rounded to 8 bits per block, then what is missing.

    MatMulNBits rounds activations in the same way, so the first rows lose nothing, and the others
    1/127 of 1/127. Both are multiplied while the weight is read once.
    """

    def make() -> str:
        last = e.ints(-1)
        blocks = e.add("Reshape", x, e.ints(-1, int(str(shape[-1])) // size, size))
        largest = e.add("ReduceMax", e.add("Abs", blocks), last)
        scale = e.add("Mul", largest, e.number(1 / 127, "f32"))
        scale = e.add("Max", scale, e.number(1e-30, "f32"))
        codes = e.add("Round", e.add("Div", blocks, scale))
        rounded = e.add("Reshape", e.add("Mul", codes, scale), e.ints(-1, int(str(shape[-1]))))
        return e.add("Concat", rounded, e.add("Sub", x, rounded), axis=0)

    return e.cached(("two parts", x, size), make)


def _stored(e: Emitter, packing: Packed) -> list[str]:
    """Codes, scales and zero points as MatMulNBits takes them; ONNX Runtime computes them once."""
    op, kind = packing.op, packing.weight.type.dtype
    scale = e.get(op.scale)
    if kind == "f4e2m1":
        codes, scale = _doubled(e, packing), e.add("Mul", scale, e.number(0.5, "f32"))
    else:
        codes = _unsigned(e, packing)
    return [codes, _per_block(e, packing, scale), *_zeros(e, packing)]


def _unsigned(e: Emitter, packing: Packed) -> str:
    """Integer codes as MatMulNBits takes them: signed ones with their highest bit inverted, which
    adds half of their number. Computed ones are written so, others are inverted in the graph."""
    weight, sign = packing.weight, _SIGNS.get(packing.weight.type.dtype, 0)
    shape = (*packing.shape, packing.size * packing.bits // 8)
    if not sign:
        return _bytes(e, weight, shape)
    if is_computed(e.storage.reader.complete(weight)):
        return _bytes(e, weight, shape, sign)
    return e.add("BitwiseXor", _bytes(e, weight, shape), e.number(sign, "u8"))


def _bytes(e: Emitter, weight: Weight, shape: tuple[int, ...], flipped: int = 0) -> str:
    """The initializer of the bytes of a weight, as u8 of a shape, with `flipped` bits inverted."""
    name, kind = e.graph.fresh(weight.name), weight.type.dtype
    form = e.storage.form(weight, kind)
    e.forms[name] = replace(form, dtype="u8", shape=shape, flipped=flipped)
    e.graph.initializers[name] = TensorProto(name=name)  # per_rank.py fills it in
    back: Ref = UnboundRef(name)
    if flipped:
        words = UnboundRef(name, words_shape(_WORDS, kind, form.shape))
        back = UnpackedRef(words, _WORDS, kind, form.shape)
    e.other_forms.setdefault(weight, back)
    return name


def _doubled(e: Emitter, packing: Packed) -> str:
    """Twice the numbers of f4e2m1, which are integers up to 12, plus 128, as u8."""
    codes = np.arange(16, dtype=np.uint8).view(numpy_dtype("f4e2m1")).astype(np.float32)
    table = e.graph.constant((2 * codes + 128).astype(np.uint8))
    pairs = _bytes(e, packing.weight, (*packing.shape, packing.size // 2, 1))
    low = e.add("BitwiseAnd", pairs, e.number(15, "u8"))
    high = e.add("BitShift", pairs, e.number(4, "u8"), direction="RIGHT")
    both = e.cast(e.add("Concat", low, high, axis=-1), "i32")
    return e.add("Reshape", e.add("Gather", table, both), e.ints(*packing.shape, packing.size))


def _per_block(e: Emitter, packing: Packed, name: str) -> str:
    """Scales or zeros [N / a, K / b], repeated to [N, K / size]."""
    (rows, columns), (n, k) = packing.op.scale.type.shape, packing.shape
    if (rows, columns) == (n, k):
        return name
    rows, columns = int(str(rows)), int(str(columns))
    apart = e.add("Reshape", name, e.ints(rows, 1, columns, 1))
    repeated = e.add("Expand", apart, e.ints(rows, n // rows, columns, k // columns))
    return e.add("Reshape", repeated, e.ints(n, k))


def _zeros(e: Emitter, packing: Packed) -> list[str]:
    """Zero points as u8, two to a byte for codes of four bits; nothing where they are the middle of
    the codes."""
    zero, offset = packing.op.zero, _OFFSETS[packing.weight.type.dtype]
    rows, columns = packing.shape
    if zero is None and offset:
        return []
    if zero is None:
        bytes = columns if packing.bits == 8 else -(-columns // 2)
        return [e.filled(0, (rows, bytes), "u8")]
    name = e.add("Add", e.cast(e.get(zero), "i32"), e.number(offset, "i32"))
    name = _per_block(e, packing, name)
    if packing.bits == 4:
        if columns % 2:
            name = e.add("Pad", name, e.ints(0, 0, 0, 1), e.number(0, "i32"))
        pairs = e.add("Reshape", name, e.ints(rows, -1, 2))
        pairs = e.add("Mul", pairs, e.graph.constant(np.array([1, 16], np.int32)))
        name = e.add("ReduceSum", pairs, e.ints(-1), keepdims=0)
    return [e.cast(name, "u8")]


def per_index(op: QuantizedOp) -> int | None:
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
    split = [(dim, size) for dim, size in enumerate(sizes) if size != 1]
    if len(split) != 1:
        return None
    dim, size = split[0]
    return (dim, size) if isinstance(size, int) else None


def _four_bit_zero(op: ops.Dequantize) -> bool:
    """Whether zero points cannot get another shape, for which ONNX Runtime has no kernel."""
    return isinstance(op.zero, Weight) and dtype(op.zero.type.dtype).bits < 8


def scales_refusal(op: Op) -> str | None:
    """Why the scales fit no form of DequantizeLinear."""
    assert isinstance(op, ops.Dequantize)
    if in_blocks(op) is not None or (per_index(op) is not None and not _four_bit_zero(op)):
        return None
    return "has blocks along several dimensions, which DequantizeLinear does not have"


def _refusal(op: Op) -> str | None:
    kind = op.operands[0].type.dtype
    if packed(op) is not None or _rounds_in_blocks(op):
        return None
    if isinstance(op.operands[0].producer, ops.Quantize):
        return "would become a QGemm, whose sums overflow in 16 bits on processors without VNNI"
    return f"takes {kind}, which is f32 by then" if is_float(kind) else scales_refusal(op)


def _not_native(op: Op) -> str | None:
    assert isinstance(op, ops.Quantize)
    fits = (op.dtype in ("i8", "u8") and per_index(op) is not None) or _rounds_in_blocks(op)
    return None if fits else "has codes or blocks without a fast kernel"


@TABLE.lower(ops.Quantize, unless=_not_native)
def quantize(e: Emitter, op: ops.Quantize) -> Lowered:
    """QuantizeLinear; nothing for products that round their inputs themselves."""
    if _rounds_in_blocks(op):
        return Later(lambda: _expanded(e, op))
    dim = per_index(op)
    assert dim is not None
    shaped = [e.get(op.scale), *([e.get(op.zero)] if op.zero is not None else [])]
    scales: Shape = () if dim < 0 else (op.scale.type.shape[dim],)
    shaped = [e.add("Reshape", name, e.shape(scales)) for name in shaped]
    along = {} if dim < 0 else {"axis": dim}
    if op.zero is None and dim < 0:  # what moves nodes in ONNX Runtime 1.32 loses output_dtype
        shaped.append(e.number(0, op.dtype))
    elif op.zero is None:
        along["output_dtype"] = DTYPES[op.dtype]
    return e.add("QuantizeLinear", e.get(op.x), *shaped, **along)


@TABLE.lower(ops.Dequantize, unless=_refusal)
def dequantize(e: Emitter, op: ops.Dequantize) -> Lowered:
    """DequantizeLinear; nothing for products, where MatMulNBits reads the codes."""
    if packed(op) is None and _rounds_in_blocks(op):
        return Later(lambda: _expanded(e, op))
    return Later(lambda: _made(e, op)) if packed(op) is not None else dequantized(e, op)


def _made(e: Emitter, op: ops.Dequantize) -> str:
    if op.x.type.dtype != "f4e2m1" and scales_refusal(op) is None:
        return dequantized(e, op)
    return _expanded(e, op)


def _expanded(e: Emitter, op: Op) -> str:
    e.expand(op)
    return e.get(op.result)


def _not_rounded(op: Op) -> str | None:
    return None if _rounds_in_blocks(op) else "is no rounding that MatMulNBits does itself"


@TABLE.lower(ops.DynamicScale, unless=_not_rounded)
def dynamic_scale(e: Emitter, op: ops.DynamicScale) -> Lowered:
    """Nothing for products that round their inputs themselves, else what it expands to."""
    return Later(lambda: _expanded(e, op))


def dequantized(e: Emitter, op: ops.Dequantize, scale: str = "") -> str:
    """DequantizeLinear; `scale` names the scales in the dtype of the result, where that differs."""
    dim, blocks = per_index(op), in_blocks(op)
    scales: Shape | None = None
    attributes: dict[str, int] = {}
    if dim is not None and not _four_bit_zero(op):
        scales = () if dim < 0 else (op.scale.type.shape[dim],)
        attributes = {} if dim < 0 else {"axis": dim}
    elif blocks is not None:
        attributes = {"axis": blocks[0], "block_size": blocks[1]}
    x, *zero = _quantized(e, [op.x, *([op.zero] if op.zero is not None else [])])
    kind, result_dtype = (
        e.dtype(op.scale),
        e.dtype(op.result),
    )  # a node makes the dtype of its scales
    kind = result_dtype if scale else kind
    scale = scale or (e.get(op.scale) if kind == result_dtype else e.cast(e.get(op.scale), "f32"))
    shaped = [scale, *zero]
    if scales is not None:
        shaped = [e.add("Reshape", name, e.shape(scales)) for name in shaped]
    values = e.add("DequantizeLinear", x, *shaped, **attributes)
    return values if result_dtype in (kind, "f32") else e.cast(values, result_dtype)


def _quantized(e: Emitter, values: list[Value]) -> list[str]:
    """The names of values of one dtype: weights as stored, maybe in four bits."""
    weights = [weight for value in values if (weight := e.weight(value)) is not None]
    if len(weights) < len(values):  # what is computed is wider
        return [e.get(value) for value in values]
    return [e.stored(weight)[0] for weight in weights]
