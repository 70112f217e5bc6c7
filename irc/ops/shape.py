"""Operations that rearrange elements: new shapes, orders, parts and unions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import Op
from ..declare import Operand, Operands, operation
from ..dims import Dim, DimLike, exact_divide, product
from ..errors import Error
from ..types import TensorType
from .factors import reshape_rule
from .shapes import (
    letters,
    not_above,
    position,
    positions,
    rule_text,
    run_sizes,
    same_but,
    same_dtype,
    shape_text,
)


@operation("reshape", sums="x")
class Reshape(Op):
    """The same elements in row-major order, in another shape of as many elements.

    A split of the first dimension of a group of dimensions that are merged or divided passes
    through, as in `[B, S, 64@tp] -> [B, S, 8@tp, 8]`; every other split must be gathered before.
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


@operation("expand", sums="x")
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
        words = letters(len(old), stretched)
        kept = ["1" if i in stretched else word for i, word in enumerate(words)]
        return rule_text([words], [["1"] * new + kept])

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        return {"shape": results[0].shape}

    def evaluate(self, x: Any) -> Any:
        return np.broadcast_to(x, run_sizes(self.opname, self.shape))


@operation("squeeze", sums="x")
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
        rank = self.x.type.rank
        gone = positions(self.opname, self.dims, rank)
        words = letters(rank, gone)
        return rule_text([words], [[w for i, w in enumerate(words) if i not in gone]])

    def evaluate(self, x: Any) -> Any:
        return np.squeeze(x, positions(self.opname, self.dims, np.ndim(x)))


@operation("unsqueeze", sums="x")
class Unsqueeze(Op):
    """x with new dimensions of size 1, which stand at `dims` of the result."""

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
        words = letters(self.x.type.rank)
        return rule_text([words], [self._spread(list(words), "1")])

    def evaluate(self, x: Any) -> Any:
        return np.expand_dims(x, self.dims)


@operation("transpose", sums="x")
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
        words = letters(self.x.type.rank)
        return rule_text([words], [[words[i] for i in self.order]])

    def evaluate(self, x: Any) -> Any:
        return np.transpose(x, self.order)


@operation("slice", sums="x")
class Slice(Op):
    """Elements `start`, `start + step`, ... before `stop` of dimension `dim`.

    Both ends count from the front and lie within the dimension; what symbols leave open is
    checked at run time. The dimension must be whole.
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

    def sharding_rule(self) -> str:
        rank = self.x.type.rank
        words = letters(rank, [self.dim % rank])
        return rule_text([words], [words])

    def evaluate(self, x: Any) -> Any:
        start, stop = run_sizes(self.opname, (self.start, self.stop))
        size = x.shape[self.dim]
        if not 0 <= start <= stop <= size:
            raise Error(f"slice: {start} to {stop} lies outside a dimension of {size}")
        before = (slice(None),) * position(self.opname, self.dim, x.ndim)
        return x[(*before, slice(start, stop, self.step))]


@operation("split")
class Split(Op):
    """Consecutive parts of dimension `dim`, of the given sizes, which add up to the whole."""

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

    def sharding_rule(self) -> str:
        rank = self.x.type.rank
        words = letters(rank, [self.dim % rank])
        return rule_text([words], [words])

    def evaluate(self, x: Any) -> Any:
        ends = np.cumsum(run_sizes(self.opname, self.sizes))[:-1]
        return tuple(np.split(x, ends, self.dim))


@operation("concat")
class Concat(Op):
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

    def sharding_rule(self) -> str:
        rank = self.values[0].type.rank
        words = letters(rank, [self.dim % rank])
        return rule_text([words], [words])

    def evaluate(self, *values: Any) -> Any:
        return np.concatenate(values, self.dim)


@operation("stack")
class Stack(Op):
    """The operands, all of one shape, along a new dimension, which is `dim` of the result."""

    values: Operands
    dim: int = 0

    def expand(self) -> Op:
        if not self.values:
            raise Error("stack needs at least one operand")
        same_but(self.opname, -1, [v.type.shape for v in self.values])
        same_dtype(self.opname, *self.values)
        at = position(self.opname, self.dim, self.values[0].type.rank + 1)
        return Concat([Unsqueeze(v, dims=(at,)) for v in self.values], dim=at)

    def sharding_rule(self) -> str:
        words = letters(self.values[0].type.rank)
        at = self.dim % (len(words) + 1)
        return rule_text([words], [[*words[:at], "1", *words[at:]]])

    def evaluate(self, *values: Any) -> Any:
        return np.stack(values, self.dim)
