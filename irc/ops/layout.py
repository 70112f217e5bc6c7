"""Operations that repeat, turn around and surround elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import Error
from ..ir.attributes import Number
from ..ir.core import Op
from ..ir.declare import Operand, operation
from ..ir.dims import DimLike
from ..ir.facts import Bound
from ..ir.types import TensorType
from .shapes import not_above, number_fits, position, positions, rule_along, run_sizes


@operation("flip", sums="x", moves_data=True, reads="once")
class Flip(Op):
    """x with the elements along `dims` in reverse order."""

    x: Operand
    dims: tuple[int, ...]

    def infer(self) -> TensorType:
        positions(self.opname, self.dims, self.x.type.ndim)
        return self.x.type.replicated

    def sharding_rule(self) -> str:
        return rule_along(self.x.type, *self.dims)

    def evaluate(self, x: Any) -> Any:
        return np.flip(x, self.dims)


@operation("repeat", sums="x", moves_data=True)
class Repeat(Op):
    """Every element along `dim`, `count` times in a row: [1, 2] by 2 is [1, 1, 2, 2]."""

    x: Operand
    dim: int
    count: int

    def infer(self) -> TensorType:
        shape = self.x.type.shape
        at = position(self.opname, self.dim, len(shape))
        if self.count < 1:
            raise Error(f"repeat: count is {self.count}, but it must be at least 1")
        return TensorType(
            self.x.type.dtype, (*shape[:at], shape[at] * self.count, *shape[at + 1 :])
        )

    def sharding_rule(self) -> str:
        return rule_along(self.x.type)

    def evaluate(self, x: Any) -> Any:
        return np.repeat(x, self.count, self.dim)


@operation("pad", moves_data=True, reads="once")
class Pad(Op):
    """x with `before[i]` and `after[i]` elements of `value` around dimension i."""

    x: Operand
    before: tuple[DimLike, ...]
    after: tuple[DimLike, ...]
    value: Number = 0

    def infer(self) -> TensorType:
        type = self.x.type
        if not len(self.before) == len(self.after) == type.ndim:
            raise Error(f"pad: before and after need {type.ndim} entries each, one per dimension")
        for size in (*self.before, *self.after):
            not_above(self.opname, 0, size, "0 elements and a padding:")
        number_fits(self.opname, self.value, type.dtype)
        sizes = zip(self.before, type.shape, self.after, strict=True)
        return TensorType(type.dtype, tuple(a + n + b for a, n, b in sizes))

    def bound(self, result: int) -> Bound:
        """Padding may be infinite."""
        return "operands" if math.isfinite(self.value) else "no"

    def sharding_rule(self) -> str:
        ends = enumerate(zip(self.before, self.after, strict=True))
        return rule_along(self.x.type, *[i for i, (a, b) in ends if a != 0 or b != 0])

    def local_sums(self) -> tuple[frozenset[str], ...]:
        """Elements of 0 add nothing to a sum over ranks."""
        return (frozenset(["x"]),) if self.value == 0 else ()

    def evaluate(self, x: Any) -> Any:
        before, after = (run_sizes(self.opname, sizes) for sizes in (self.before, self.after))
        ends = list(zip(before, after, strict=True))
        return np.pad(x, ends, constant_values=self.value) if ends else x
