"""Quantized tensors: narrow numbers (codes), and the scales that give them their size."""

from __future__ import annotations

from math import gcd, log2
from typing import Any, Literal

import numpy as np

from ..errors import Error
from ..ir.core import Module, Op, Value, Weight
from ..ir.declare import Operand, OptionalOperand, operation, operation_base, optional
from ..ir.dims import Dim, DimLike, Shape, exact_divide
from ..ir.dtypes import dtype as dtype_called
from ..ir.dtypes import is_float, largest, numpy_dtype
from ..ir.mesh import Mesh
from ..ir.types import Axes, TensorType
from .control import Full
from .elementwise import Abs, Add, Clip, Div, Maximum, Mul, Sub
from .functions import Round
from .logic import Cast, Eq, Where
from .reduce import ReduceMax
from .shape import Reshape
from .shapes import dim_names, rule_text, shape_text

FLOAT_CODES = ("f8e4m3", "f8e5m2", "f4e2m1")
QUANTIZED = ("i4", "u4", "i8", "u8", *FLOAT_CODES)
FLOATS = ("f32", "f16", "bf16")
# Elements of the blocks that `shard` makes of larger ones of weights, at least; smaller ones cost
# more in scales than they save.
LEAST_BLOCK = 8
SCALES = (*FLOATS, "f8e8m0", "f8e4m3")
# The code that symmetric scales map the largest number to.
LARGEST = {"i4": 7.0, "i8": 127.0} | {
    name: largest(name) for name in ("f8e4m3", "f8e5m2", "f4e2m1")
}


def block_sizes(shape: Shape, scales: Shape) -> tuple[DimLike | None, ...]:
    """Per dimension, how many elements in a row share a scale; None where blocks do not fit."""
    return tuple(map(_block_size, shape, scales))


def _block_size(size: DimLike, blocks: DimLike) -> DimLike | None:
    if size == blocks:
        return 1
    return size if blocks == 1 else exact_divide(size, blocks)


def code_range(name: str) -> tuple[float, float]:
    """The least and the largest code of a format, without infinities."""
    kind = dtype_called(name)
    if kind.is_float:
        return -LARGEST[name], LARGEST[name]
    if kind.kind == "uint":
        return 0, 2**kind.bits - 1
    return -(2 ** (kind.bits - 1)), 2 ** (kind.bits - 1) - 1


def check_blocks(op: Op, blocks: Shape, mesh: Mesh, over: tuple[Axes, ...] | None = None) -> None:
    """An Error where one rank's shard of the first operand cuts a block.

    `over` are the axes of its dimensions, those of its type by default.
    """
    type = op.operands[0].type
    sizes = block_sizes(type.shape, blocks)
    for size, axes, count, block in zip(type.shape, over or type.axes, blocks, sizes, strict=True):
        if not axes or count == 1 or isinstance(size, Dim) or not isinstance(block, int):
            continue
        if -(-size // mesh.group_size(axes)) % block:
            raise Error(_cut_block(op, size, axes, mesh.group_size(axes), block), op)


def _cut_block(op: Op, size: int, axes: Axes, group_size: int, block: int) -> str:
    """The message about shards that cut a block, with the choices."""
    x, part = op.operands[0], -(-size // group_size)
    name = f"@{x.name}" if isinstance(x, Weight) else f"%{x.name or '_'}"
    least = LEAST_BLOCK if isinstance(x, Weight) else block
    common = {n: gcd(block, -(-size // n)) for n in range(2, 2 * group_size + 1)}
    counts = [str(n) for n, elements in common.items() if elements >= min(block, least)]
    ranks = f"{' or '.join(counts)} ranks" if counts else "one rank"
    fitting = [n for n in range(2, block) if size % n == 0 and part % n == 0]
    groups = f"quantize it in blocks of {fitting[-1]} or with" if fitting else "quantize it with"
    return (
        f"{op.opname} of {name}: {size} over {'.'.join(axes)} makes shards of {part}, which cut a "
        f"block of {block}; {groups} one scale per row, use {ranks} along {'.'.join(axes)}, or "
        "exclude it from quantization"
    )


@operation_base
class QuantizedOp(Op):
    """Base of the operations between numbers and codes. Each scale holds for a block of x."""

    __slots__ = ()
    x: Operand
    scale: Operand
    zero: OptionalOperand = optional()

    def check_scales(self, codes: str) -> None:
        """An Error unless scales divide x into blocks, and zero is of the dtype of the codes."""
        x, scale = self.x.type, self.scale.type
        if scale.dtype not in SCALES:
            raise Error(f"{self.opname} takes scales of {', '.join(SCALES)}, not {scale}")
        if scale.ndim != x.ndim or None in block_sizes(x.shape, scale.shape):
            raise Error(
                f"{self.opname}: scales {shape_text(scale.shape)} do not divide "
                f"{shape_text(x.shape)} into blocks; give as many dimensions, each a divisor"
            )
        if self.zero is None:
            return
        type = self.zero.type
        if is_float(codes) or type.dtype != codes or type.shape != scale.shape:
            raise Error(
                f"{self.opname}: zero is {type}; it must be integers of the dtype of the codes "
                f"({codes}) in the shape of scale, {shape_text(scale.shape)}"
            )

    def sharding_rule(self) -> str:
        words = dim_names(self.x.type.ndim)
        sizes = zip(words, self.scale.type.shape, self.x.type.shape, strict=True)
        scales = ["1" if blocks == 1 != size else word for word, blocks, size in sizes]
        return rule_text([words, scales, scales], [words])

    def verify(self, module: Module) -> None:
        self.check_parts(module.mesh)

    def check_parts(self, mesh: Mesh, over: tuple[Axes, ...] | None = None) -> None:
        """An Error where one rank's shard of x, sharded over `over`, cuts a block."""
        check_blocks(self, self.scale.type.shape, mesh, over)

    def _wide(self, value: Value) -> Op:
        """x, scales or zeros in f32, every dimension in blocks as two, so that they broadcast."""
        return Reshape(Cast(value, dtype="f32"), shape=self._apart(value.type.shape))

    def _apart(self, shape: Shape) -> Shape:
        """A shape with every dimension in blocks as two, [blocks, size of a block]."""
        parts: list[DimLike] = []
        for mine, size, blocks in zip(shape, self.x.type.shape, self.scale.type.shape, strict=True):
            cut = blocks not in (1, size)
            parts += [blocks, exact_divide(mine, blocks) or 1] if cut else [mine]
        return tuple(parts)


@operation("dequantize", cheap=True)
class Dequantize(QuantizedOp):
    """(x - zero) * scale, where each scale holds for a block of x; in `dtype`, that of scale if "".

    x [D0, D1, ...] is i4, u4, i8, u8, f8e4m3, f8e5m2 or f4e2m1. scale has as many dimensions, and
    each divides that of x: [1, 1] is one scale for all, [N, 1] one per row, [N, K/128] one per 128
    elements of a row. Scales of f8e8m0 and f8e4m3 need a `dtype`. zero, integers of x's dtype in
    the shape of scale, is 0 by default. Computed in f32 and rounded once (ONNX DequantizeLinear).
    A shard must hold whole blocks.
    """

    dtype: Literal["", "f32", "f16", "bf16"] = ""

    def infer(self) -> TensorType:
        x = self.x.type
        if x.dtype not in QUANTIZED:
            raise Error(f"dequantize takes {', '.join(QUANTIZED)}, not {x}")
        self.check_scales(x.dtype)
        wanted = self.dtype or self.scale.type.dtype
        if wanted not in FLOATS:
            raise Error(f"dequantize: scales of {wanted} need a dtype; give dtype, such as f32")
        return TensorType(wanted, x.shape)

    def expand(self) -> Op:
        values = self._wide(self.x)
        if self.zero is not None:
            values = Sub(values, self._wide(self.zero))
        whole = Reshape(Mul(values, self._wide(self.scale)), shape=self.x.type.shape)
        return Cast(whole, dtype=self.dtype or self.scale.type.dtype)

    @np.errstate(over="ignore", under="ignore", invalid="ignore")
    def evaluate(self, x: Any, scale: Any, zero: Any) -> Any:
        values = x.astype(np.float32)
        if zero is not None:
            values = values - _spread(zero.astype(np.float32), x.shape)
        return values * _spread(scale.astype(np.float32), x.shape)


@operation("quantize", bounded="always")
class Quantize(QuantizedOp):
    """The codes of x: x / scale rounded to nearest even, plus zero, saturated; in `dtype`.

    Each scale, a positive number, holds for a block of x, as in dequantize. zero, integers of
    `dtype` in the shape of scale, is 0 by default. Divided in f32; integer codes of NaN are
    undefined (ONNX QuantizeLinear). A shard must hold whole blocks.
    """

    dtype: Literal["i4", "u4", "i8", "u8", "f8e4m3", "f8e5m2", "f4e2m1"] = "i8"

    def infer(self) -> TensorType:
        x = self.x.type
        if x.dtype not in FLOATS:
            raise Error(f"quantize takes {', '.join(FLOATS)}, not {x}")
        self.check_scales(self.dtype)
        return TensorType(self.dtype, x.shape)

    def expand(self) -> Op:
        values: Op = Div(self._wide(self.x), self._wide(self.scale))
        if not is_float(self.dtype):
            values = Round(values)
        if self.zero is not None:
            values = Add(values, self._wide(self.zero))
        low, high = code_range(self.dtype)
        whole = Reshape(Clip(values, low=low, high=high), shape=self.x.type.shape)
        return Cast(whole, dtype=self.dtype)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any, scale: Any, zero: Any) -> Any:
        values = x.astype(np.float32) / _spread(scale.astype(np.float32), x.shape)
        if not is_float(self.dtype):
            values = np.rint(values)
        if zero is not None:
            values = values + _spread(zero.astype(np.float32), x.shape)
        kind = dtype_called(self.dtype)
        codes = np.clip(values, *code_range(self.dtype))
        return codes.astype(numpy_dtype(kind.name if kind.is_float else kind.wider or kind.name))


@operation("dynamic_scale")
class DynamicScale(Op):
    """The scales that map x to codes of `dtype`: largest |x| of a block / largest code.

    x [..., K] gives [..., 1], one scale per token, or [..., K/block]. In dtype `scale`; 1 where
    that would be 0. f8e8m0 scales are powers of two, the exponent of the largest |x| less that of
    the largest code (OCP MX). f8e4m3 scales are divided by tensor_scale, f32 [1, ..., 1] (NVFP4).
    A shard must hold whole blocks.
    """

    x: Operand
    tensor_scale: OptionalOperand = optional()
    dtype: Literal["i4", "i8", "f8e4m3", "f8e5m2", "f4e2m1"] = "f8e4m3"
    block: int = 0
    scale: Literal["f32", "f16", "bf16", "f8e8m0", "f8e4m3"] = "f32"

    def infer(self) -> TensorType:
        x = self.x.type
        if x.dtype not in FLOATS or not x.ndim:
            raise Error(f"dynamic_scale takes {', '.join(FLOATS)} of 1 dimension or more, not {x}")
        blocks = exact_divide(x.shape[-1], self.block) if self.block > 0 else 1
        if blocks is None or self.block < 0:
            raise Error(f"dynamic_scale: blocks of {self.block} do not divide {x.shape[-1]}")
        self._check_tensor_scale()
        return TensorType(self.scale, (*x.shape[:-1], blocks))

    def _check_tensor_scale(self) -> None:
        if (self.tensor_scale is None) == (self.scale == "f8e4m3"):
            raise Error(
                f"dynamic_scale: scales of {self.scale} "
                f"{'need' if self.tensor_scale is None else 'take no'} tensor_scale"
            )
        wanted = TensorType("f32", (1,) * self.x.type.ndim)
        if self.tensor_scale is not None and self.tensor_scale.type.replicated != wanted:
            raise Error(f"dynamic_scale: tensor_scale is {self.tensor_scale.type}, not {wanted}")

    def sharding_rule(self) -> str:
        ndim = self.x.type.ndim
        words = dim_names(ndim, () if self.block else (ndim - 1,))
        result = [*words[:-1], words[-1] if self.block else "1"]
        return rule_text([words, ["1"] * ndim], [result])

    def verify(self, module: Module) -> None:
        self.check_parts(module.mesh)

    def check_parts(self, mesh: Mesh, over: tuple[Axes, ...] | None = None) -> None:
        """An Error where one rank's shard of x, sharded over `over`, cuts a block."""
        check_blocks(self, self.results[0].type.shape, mesh, over)

    def expand(self) -> Op:
        x = self.x.type
        most: Op = Abs(self.x)
        if self.block:
            blocks = exact_divide(x.shape[-1], self.block) or 0
            most = Reshape(most, shape=(*x.shape[:-1], blocks, self.block))
        most = ReduceMax(most, dims=(-1,), keep=not self.block)
        most = Cast(Maximum(most, Full(value=0.0, dtype=x.dtype)), dtype="f32")
        if self.scale == "f8e8m0":
            powers = Mul(most, _number(rounded_down_factor(self.dtype)))
            return Cast(Where(Eq(most, _number(0)), _number(1), powers), dtype=self.scale)
        scales: Op = Div(most, _number(LARGEST[self.dtype]))
        if self.tensor_scale is not None:
            scales = Clip(Div(scales, self.tensor_scale), high=LARGEST["f8e4m3"])
        rounded = Cast(scales, dtype=self.scale)
        none = Eq(rounded, Full(value=0.0, dtype=self.scale))
        return Where(none, Full(value=1.0, dtype=self.scale), rounded)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any, tensor_scale: Any) -> Any:
        most = np.abs(x.astype(np.float32))
        if self.block:
            most = most.reshape(*x.shape[:-1], x.shape[-1] // self.block, self.block)
        most = np.max(most, axis=-1, keepdims=not self.block, initial=0)
        if self.scale == "f8e8m0":
            scales = np.where(most == 0, 1, most * np.float32(rounded_down_factor(self.dtype)))
        else:
            scales = most / np.float32(LARGEST[self.dtype])
        if tensor_scale is not None:
            scales = np.minimum(scales / tensor_scale, np.float32(LARGEST["f8e4m3"]))
        rounded = scales.astype(numpy_dtype(self.scale)).astype(np.float32)
        return np.where(rounded == 0, np.float32(1), rounded)


def rounded_down_factor(codes: str) -> float:
    """The factor that makes the nearest power of two the largest one below, less that of codes.

    Of x from 2 ** e, the nearest power to 3/4 * x is 2 ** e, since halves are rounded up.
    """
    return 0.75 / 2 ** int(log2(LARGEST[codes]))


def _number(value: float) -> Op:
    return Full(value=float(value), dtype="f32")


def _spread(blocks: Any, shape: tuple[int, ...]) -> Any:
    """Every element repeated over its block."""
    for dim, size in enumerate(shape):
        if blocks.shape[dim] not in (1, size):
            blocks = np.repeat(blocks, size // blocks.shape[dim], axis=dim)
    return blocks
