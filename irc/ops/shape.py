"""Operations that give the same elements another shape or order, or repeat them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import Error
from ..ir.core import Op
from ..ir.declare import Operand, operation
from ..ir.dims import DimLike, product
from ..ir.types import TensorType
from .factors import reshape_rule
from .shapes import dim_names, position, positions, rule_text, run_sizes, shape_text


@operation("reshape", sums="x", moves_data=True, is_view=True, reads="once")
class Reshape(Op):
    """The same elements in row-major order, in another shape of as many elements.

    The axes of the first of the dimensions that are merged or divided pass through, as in
    `[B, S, 64@tp] -> [B, S, 8@tp, 8]`; other sharded dimensions must be gathered first.
    """

    x: Operand
    shape: tuple[DimLike, ...]

    def infer(self) -> TensorType:
        old = self.x.type.shape
        if -1 in self.shape:
            raise Error(f"reshape: write the size instead of the -1 in {shape_text(self.shape)}")
        count, wanted = product(old), product(self.shape)
        if count != wanted:
            raise Error(
                f"reshape: {shape_text(old)} has {count} elements, "
                f"but {shape_text(self.shape)} has {wanted}"
            )
        return TensorType(self.x.type.dtype, self.shape)

    def sharding_rule(self) -> str:
        return reshape_rule(self.x.type.shape, self.shape)

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        return {"shape": results[0].shape}

    def evaluate(self, x: Any) -> Any:
        return np.reshape(x, run_sizes(self.opname, self.shape))


@operation("expand", sums="x", moves_data=True)
class Expand(Op):
    """x repeated along dimensions of size 1, and along new ones in front, to fill `shape`."""

    x: Operand
    shape: tuple[DimLike, ...]

    def infer(self) -> TensorType:
        old = self.x.type.shape
        tail = self.shape[len(self.shape) - len(old) :]
        if len(old) > len(self.shape) or any(
            a not in (1, b) for a, b in zip(old, tail, strict=True)
        ):
            raise Error(f"expand: {shape_text(old)} does not stretch to {shape_text(self.shape)}")
        return TensorType(self.x.type.dtype, self.shape)

    def sharding_rule(self) -> str:
        old = self.x.type.shape
        new = len(self.shape) - len(old)
        stretched = [i for i, size in enumerate(old) if size == 1 and self.shape[new + i] != 1]
        words = dim_names(len(old), stretched)
        kept = ["1" if i in stretched else word for i, word in enumerate(words)]
        return rule_text([words], [["1"] * new + kept])

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        return {"shape": results[0].shape}

    def evaluate(self, x: Any) -> Any:
        return np.broadcast_to(x, run_sizes(self.opname, self.shape))


@operation("squeeze", sums="x", moves_data=True, is_view=True, reads="once")
class Squeeze(Op):
    """x without the dimensions `dims`, each of which has size 1."""

    x: Operand
    dims: tuple[int, ...]

    def infer(self) -> TensorType:
        shape = self.x.type.shape
        gone = positions(self.opname, self.dims, len(shape))
        for i in gone:
            if shape[i] != 1:
                raise Error(f"squeeze: dimension {i} of {shape_text(shape)} is not 1")
        kept = tuple(size for i, size in enumerate(shape) if i not in gone)
        return TensorType(self.x.type.dtype, kept)

    def sharding_rule(self) -> str:
        rank = self.x.type.ndim
        gone = positions(self.opname, self.dims, rank)
        words = dim_names(rank, gone)
        return rule_text([words], [[w for i, w in enumerate(words) if i not in gone]])

    def evaluate(self, x: Any) -> Any:
        return np.squeeze(x, positions(self.opname, self.dims, np.ndim(x)))


@operation("unsqueeze", sums="x", moves_data=True, is_view=True, reads="once")
class Unsqueeze(Op):
    """x with new dimensions of size 1, at the positions `dims` of the result."""

    x: Operand
    dims: tuple[int, ...]

    def infer(self) -> TensorType:
        return TensorType(self.x.type.dtype, tuple(self._spread(list(self.x.type.shape), 1)))

    def _spread(self, items: list[Any], new: Any) -> list[Any]:
        """`items` with `new` put in at every new dimension."""
        rest = iter(items)
        rank = len(items) + len(self.dims)
        places = positions(self.opname, self.dims, rank)
        return [new if i in places else next(rest) for i in range(rank)]

    def sharding_rule(self) -> str:
        words = dim_names(self.x.type.ndim)
        return rule_text([words], [self._spread(list(words), "1")])

    def evaluate(self, x: Any) -> Any:
        return np.expand_dims(x, self.dims)


@operation("transpose", sums="x", moves_data=True, reads="once")
class Transpose(Op):
    """x with its dimensions in another order: dimension i of the result is `order[i]` of x."""

    x: Operand
    order: tuple[int, ...]

    def infer(self) -> TensorType:
        shape = self.x.type.shape
        if len(self.order) != len(shape):
            raise Error(f"transpose: order has {len(self.order)} entries for {shape_text(shape)}")
        places = [position(self.opname, i, len(shape)) for i in self.order]
        if len(set(places)) != len(places):
            raise Error(f"transpose: order {list(self.order)} names a dimension twice")
        return TensorType(self.x.type.dtype, tuple(shape[i] for i in places))

    def sharding_rule(self) -> str:
        words = dim_names(self.x.type.ndim)
        return rule_text([words], [[words[i] for i in self.order]])

    def evaluate(self, x: Any) -> Any:
        return np.transpose(x, self.order)
