"""Comparison, logic, selection and conversion, one element at a time."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..errors import Error
from ..ir.core import Op
from ..ir.declare import Operand, operation
from ..ir.dtypes import dtype, is_float, largest, numpy_dtype
from ..ir.facts import Bound
from ..ir.types import TensorType
from .elementwise import Binary, Check, Unary
from .shapes import any_operand, bool_operand, broadcast, same_dtype


class Comparison(Binary):
    """Base of the comparisons: two operands of one dtype, a bool result; NaN equals nothing."""

    __slots__ = ()
    made: ClassVar[str] = "bool"


@operation("eq", commutative=True)
class Eq(Comparison):
    """Whether x equals y, as bool; false where one is NaN."""

    check: ClassVar[Check] = staticmethod(any_operand)
    ufunc = np.equal


@operation("ne", commutative=True)
class Ne(Comparison):
    """Whether x differs from y, as bool; true where one is NaN."""

    check: ClassVar[Check] = staticmethod(any_operand)
    ufunc = np.not_equal


@operation("lt")
class Lt(Comparison):
    """Whether x < y, as bool."""

    ufunc = np.less


@operation("le")
class Le(Comparison):
    """Whether x <= y, as bool."""

    ufunc = np.less_equal


@operation("gt")
class Gt(Comparison):
    """Whether x > y, as bool."""

    ufunc = np.greater


@operation("ge")
class Ge(Comparison):
    """Whether x >= y, as bool."""

    ufunc = np.greater_equal


class Logic(Binary):
    """Base of the logic on two bool operands."""

    __slots__ = ()
    check: ClassVar[Check] = staticmethod(bool_operand)


@operation("and", commutative=True)
class And(Logic):
    """Whether x and y are both true."""

    ufunc = np.logical_and


@operation("or", commutative=True)
class Or(Logic):
    """Whether x or y is true."""

    ufunc = np.logical_or


@operation("not")
class Not(Unary):
    """Whether x is false."""

    check: ClassVar[Check] = staticmethod(bool_operand)
    ufunc = np.logical_not


_where: Any = np.where


@operation("where", sharding="..., ..., ... -> ...", sums="x y", bounded="operands")
class Where(Op):
    """x where the condition holds, else y; all three broadcast."""

    condition: Operand
    x: Operand
    y: Operand

    def infer(self) -> TensorType:
        shapes = [v.type.shape for v in (self.condition, self.x, self.y)]
        bool_operand(self.opname, self.condition)
        return TensorType(same_dtype(self.opname, self.x, self.y), broadcast(*shapes))

    def evaluate(self, condition: Any, x: Any, y: Any) -> Any:
        return _where(condition, x, y)


@operation("cast", sharding="... -> ...", keeps_zeros=True, moves_data=True)
class Cast(Op):
    """x converted to `dtype`.

    Between floats to the nearest, halves to even (up in f8e8m0); from float to integer towards
    zero, undefined where the integer cannot hold the value; between integers modulo 2 to the power
    of the width; to bool as x != 0. A float beyond the largest number becomes infinity, or NaN
    where the dtype has none (f8e4m3, f8e8m0), and 6 in f4e2m1.
    """

    x: Operand
    dtype: str

    def infer(self) -> TensorType:
        dtype(self.dtype)
        return TensorType(self.dtype, self.x.type.shape)

    def bound(self, result: int) -> Bound:
        """A float with smaller numbers than the operand's may overflow."""
        fits = largest(self.dtype) >= largest(self.x.type.dtype) or not is_float(self.dtype)
        return "operands" if fits else "no"

    def local_sums(self) -> tuple[frozenset[str], ...]:
        """Terms of a sum over ranks may be rounded before they are added."""
        floats = is_float(self.dtype) and is_float(self.x.type.dtype)
        return (frozenset(["x"]),) if floats else ()

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return np.asarray(x).astype(numpy_dtype(self.dtype))


@operation("bitcast", sharding="... -> ...")
class Bitcast(Op):
    """The bits of x as numbers of `dtype`, which has as many: 32 or 64.

    Between integers cast keeps the bits.
    """

    x: Operand
    dtype: str

    def infer(self) -> TensorType:
        source, target = dtype(self.x.type.dtype), dtype(self.dtype)
        if source.bits != target.bits or source.bits < 32:
            raise Error(
                f"bitcast takes and gives numbers of 32 or of 64 bits, not {source.name} and "
                f"{target.name}; between integers cast keeps the bits"
            )
        return TensorType(self.dtype, self.x.type.shape)

    def evaluate(self, x: Any) -> Any:
        return np.asarray(x).view(numpy_dtype(self.dtype))
