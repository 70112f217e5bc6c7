"""Operations that take tensors apart and put them together."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import Error
from ..ir.core import Op
from ..ir.declare import Operand, Operands, operation
from ..ir.dims import Dim, DimLike, exact_divide
from ..ir.types import TensorType
from .shape import Unsqueeze
from .shapes import (
    AlongDim,
    dim_names,
    not_above,
    position,
    rule_along,
    rule_text,
    run_sizes,
    same_but,
    same_dtype,
    shape_text,
)


@operation("slice", sums="x", moves_data=True, selects="x", reads="once")
class Slice(AlongDim):
    """Elements `start`, `start + step`, ... before `stop` of dimension `dim`.

    Both ends count from the front and lie within the dimension; symbols are checked
    at run time. The dimension must be replicated.
    """

    x: Operand
    dim: int
    start: DimLike
    stop: DimLike
    step: int = 1

    def infer(self) -> TensorType:
        shape = self.x.type.shape
        at = position(self.opname, self.dim, len(shape))
        if self.step < 1:
            raise Error(f"slice: step is {self.step}, but it must be positive; flip turns around")
        not_above(self.opname, 0, self.start, "0, the first place, and start:")
        not_above(self.opname, self.start, self.stop, "start")
        not_above(self.opname, self.stop, shape[at], "stop")
        size = self._size()
        return TensorType(self.x.type.dtype, (*shape[:at], size, *shape[at + 1 :]))

    def _size(self) -> DimLike:
        span = self.stop - self.start
        if not isinstance(span, Dim):
            return -(-span // self.step)
        size = exact_divide(span, self.step)
        if size is None:
            raise Error(f"slice: {span} elements cannot be shown to be a multiple of {self.step}")
        return size

    def evaluate(self, x: Any) -> Any:
        start, stop = run_sizes(self.opname, (self.start, self.stop))
        size = x.shape[self.dim]
        if not 0 <= start <= stop <= size:
            raise Error(f"slice: {start} to {stop} is out of range of a dimension of {size}")
        before = (slice(None),) * position(self.opname, self.dim, x.ndim)
        return x[(*before, slice(start, stop, self.step))]


@operation("split", sums="x", moves_data=True, selects="x", reads="once")
class Split(AlongDim):
    """Consecutive parts of dimension `dim`, of the given sizes, which add up to it."""

    x: Operand
    dim: int
    sizes: tuple[DimLike, ...]

    def infer(self) -> tuple[TensorType, ...]:
        shape = self.x.type.shape
        at = position(self.opname, self.dim, len(shape))
        total: DimLike = 0
        for size in self.sizes:
            not_above(self.opname, 0, size, "0 elements and a size:")
            total = total + size
        if total != shape[at] or not self.sizes:
            raise Error(f"split: the sizes {shape_text(self.sizes)} do not add up to {shape[at]}")
        kind = self.x.type.dtype
        return tuple(TensorType(kind, (*shape[:at], n, *shape[at + 1 :])) for n in self.sizes)

    def local_rule(self) -> str:
        """Shards that were joined are taken apart on every rank alike."""
        return rule_along(self.x.type)

    def evaluate(self, x: Any) -> Any:
        ends = np.cumsum(run_sizes(self.opname, self.sizes))[:-1]
        return tuple(np.split(x, ends, self.dim))


@operation("concat", sums="values", moves_data=True, reads="once")
class Concat(AlongDim):
    """The operands one after the other along dimension `dim`; all else is equal in them."""

    values: Operands
    dim: int

    def infer(self) -> TensorType:
        if not self.values:
            raise Error("concat needs at least one operand")
        kind = same_dtype(self.opname, *self.values)
        shapes = [v.type.shape for v in self.values]
        at = position(self.opname, self.dim, len(shapes[0]))
        same_but(self.opname, at, shapes)
        total: DimLike = 0
        for shape in shapes:
            total = total + shape[at]
        return TensorType(kind, (*shapes[0][:at], total, *shapes[0][at + 1 :]))

    def evaluate(self, *values: Any) -> Any:
        return np.concatenate(values, self.dim)


@operation("stack", sums="values", moves_data=True, reads="once")
class Stack(Op):
    """The operands, all of one shape, along a new dimension, which is `dim` of the result."""

    values: Operands
    dim: int = 0

    def expand(self) -> Op:
        if not self.values:
            raise Error("stack needs at least one operand")
        same_but(self.opname, -1, [v.type.shape for v in self.values])
        same_dtype(self.opname, *self.values)
        at = position(self.opname, self.dim, self.values[0].type.ndim + 1)
        return Concat([Unsqueeze(v, dims=(at,)) for v in self.values], dim=at)

    def sharding_rule(self) -> str:
        words = dim_names(self.values[0].type.ndim)
        at = self.dim % (len(words) + 1)
        return rule_text([words], [[*words[:at], "1", *words[at:]]])

    def evaluate(self, *values: Any) -> Any:
        return np.stack(values, self.dim)
