"""Quantized tensors: narrow numbers, and the scales that give them their size."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import Error
from ..ir.core import Module, Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, optional
from ..ir.dims import Dim, DimLike, Shape, exact_divide
from ..ir.dtypes import is_float
from ..ir.mesh import Mesh
from ..ir.types import TensorType
from .elementwise import Mul, Sub
from .logic import Cast
from .shape import Reshape
from .shapes import dim_names, rule_text, shape_text

QUANTIZED = ("i4", "u4", "i8", "u8", "f8e4m3", "f8e5m2")
SCALES = ("f32", "f16", "bf16")


def block_sizes(shape: Shape, scales: Shape) -> tuple[DimLike | None, ...]:
    """Per dimension, how many elements in a row share a scale; None where blocks do not fit."""
    return tuple(map(_block_size, shape, scales))


def _block_size(size: DimLike, blocks: DimLike) -> DimLike | None:
    if size == blocks:
        return 1
    return size if blocks == 1 else exact_divide(size, blocks)


@operation("dequantize")
class Dequantize(Op):
    """(x - zero) * scale, where each scale holds for a block of x; of the dtype of scale.

    x [D0, D1, ...] is i4, u4, i8, u8, f8e4m3 or f8e5m2. scale has as many dimensions, and each
    divides that of x: [1, 1] is one scale for all, [N, 1] one per row, [N, K/128] one per 128
    elements of a row. zero, integers of x's dtype in the shape of scale, is 0 by default.
    Computed in f32 and rounded once (ONNX DequantizeLinear). A shard must hold whole blocks.
    """

    x: Operand
    scale: Operand
    zero: OptionalOperand = optional()

    def infer(self) -> TensorType:
        x, scale = self.x.type, self.scale.type
        if x.dtype not in QUANTIZED:
            raise Error(f"dequantize takes {', '.join(QUANTIZED)}, not {x}")
        if scale.dtype not in SCALES:
            raise Error(f"dequantize takes scales of {', '.join(SCALES)}, not {scale}")
        if scale.ndim != x.ndim or None in block_sizes(x.shape, scale.shape):
            raise Error(
                f"dequantize: scales {shape_text(scale.shape)} do not divide {shape_text(x.shape)} "
                "into blocks; give as many dimensions, each a divisor"
            )
        self._check_zero(x)
        return TensorType(scale.dtype, x.shape)

    def _check_zero(self, x: TensorType) -> None:
        if self.zero is None:
            return
        found = self.zero.type
        alike = found.dtype == x.dtype and found.shape == self.scale.type.shape
        if is_float(x.dtype) or not alike:
            raise Error(
                f"dequantize: zero is {found}; it must be integers of the dtype of x ({x.dtype}) "
                f"in the shape of scale, {shape_text(self.scale.type.shape)}"
            )

    def sharding_rule(self) -> str:
        words = dim_names(self.x.type.ndim)
        sizes = zip(words, self.scale.type.shape, self.x.type.shape, strict=True)
        scales = ["1" if blocks == 1 != size else word for word, blocks, size in sizes]
        return rule_text([words, scales, scales], [words])

    def verify(self, module: Module) -> None:
        self.check_parts(module.mesh)

    def check_parts(self, mesh: Mesh) -> None:
        """An Error where one rank's shard of x, cuts a block."""
        x, scale = self.x.type, self.scale.type
        sizes = block_sizes(x.shape, scale.shape)
        for size, axes, blocks, block in zip(x.shape, x.axes, scale.shape, sizes, strict=True):
            if not axes or blocks == 1 or isinstance(size, Dim) or not isinstance(block, int):
                continue
            part = -(-size // mesh.group_size(axes))
            if part % block:
                raise Error(
                    f"dequantize: {size} over {'.'.join(axes)} makes shards of {part}, which cut a "
                    f"block of {block}; quantize in smaller blocks, or keep the dimension "
                    "replicated",
                    self,
                )

    def expand(self) -> Op:
        """Every dimension in blocks becomes two, [blocks, size of a block]."""
        values: Op = Reshape(Cast(self.x, dtype="f32"), shape=self._apart(self.x.type.shape))
        if self.zero is not None:
            values = Sub(values, self._blocks(self.zero))
        scaled = Mul(values, self._blocks(self.scale))
        whole = Reshape(scaled, shape=self.x.type.shape)
        return Cast(whole, dtype=self.scale.type.dtype)

    def _blocks(self, value: Value) -> Op:
        """Scales or zeros, so shaped that each meets its block."""
        return Reshape(Cast(value, dtype="f32"), shape=self._apart(self.scale.type.shape))

    def _apart(self, shape: Shape) -> Shape:
        """A shape with every dimension in blocks as two."""
        parts: list[DimLike] = []
        for mine, size, blocks in zip(shape, self.x.type.shape, self.scale.type.shape, strict=True):
            cut = blocks not in (1, size)
            parts += [blocks, exact_divide(mine, blocks) or 1] if cut else [mine]
        return tuple(parts)

    @np.errstate(over="ignore", under="ignore", invalid="ignore")
    def evaluate(self, x: Any, scale: Any, zero: Any) -> Any:
        values = x.astype(np.float32)
        if zero is not None:
            values = values - _spread(zero.astype(np.float32), x.shape)
        return values * _spread(scale.astype(np.float32), x.shape)


def _spread(blocks: Any, shape: tuple[int, ...]) -> Any:
    """Every element repeated over its block."""
    for dim, size in enumerate(shape):
        if blocks.shape[dim] not in (1, size):
            blocks = np.repeat(blocks, size // blocks.shape[dim], axis=dim)
    return blocks
