"""Comparison, logic, selection and conversion, one element at a time."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..core import Op
from ..declare import Operand, operation
from ..dtypes import dtype, numpy_dtype
from ..types import TensorType
from .shapes import bool_operand, broadcast, number_operand, same_dtype


class Comparison(Op):
    """Base of the comparisons: two operands of one dtype, a bool result; NaN equals nothing."""

    __slots__ = ()
    ufunc: ClassVar[Any]
    x: Operand
    y: Operand

    def infer(self) -> TensorType:
        same_dtype(self.opname, self.x, self.y)
        return TensorType("bool", broadcast(self.x.type.shape, self.y.type.shape))

    def evaluate(self, x: Any, y: Any) -> Any:
        return type(self).ufunc(x, y)


class Order(Comparison):
    """Base of the comparisons that bool has no part in."""

    __slots__ = ()

    def infer(self) -> TensorType:
        same_dtype(self.opname, self.x, self.y)
        number_operand(self.opname, self.x)
        return TensorType("bool", broadcast(self.x.type.shape, self.y.type.shape))


@operation("eq", sharding="..., ... -> ...", commutative=True)
class Eq(Comparison):
    """Whether x equals y, as bool; false where one is NaN."""

    x: Operand
    y: Operand
    ufunc = np.equal


@operation("ne", sharding="..., ... -> ...", commutative=True)
class Ne(Comparison):
    """Whether x differs from y, as bool; true where one is NaN."""

    x: Operand
    y: Operand
    ufunc = np.not_equal


@operation("lt", sharding="..., ... -> ...")
class Lt(Order):
    """Whether x < y, as bool."""

    x: Operand
    y: Operand
    ufunc = np.less


@operation("le", sharding="..., ... -> ...")
class Le(Order):
    """Whether x <= y, as bool."""

    x: Operand
    y: Operand
    ufunc = np.less_equal


@operation("gt", sharding="..., ... -> ...")
class Gt(Order):
    """Whether x > y, as bool."""

    x: Operand
    y: Operand
    ufunc = np.greater


@operation("ge", sharding="..., ... -> ...")
class Ge(Order):
    """Whether x >= y, as bool."""

    x: Operand
    y: Operand
    ufunc = np.greater_equal


class Logic(Op):
    """Base of the logic on two bool operands."""

    __slots__ = ()
    ufunc: ClassVar[Any]
    x: Operand
    y: Operand

    def infer(self) -> TensorType:
        for operand in (self.x, self.y):
            bool_operand(self.opname, operand)
        return TensorType("bool", broadcast(self.x.type.shape, self.y.type.shape))

    def evaluate(self, x: Any, y: Any) -> Any:
        return type(self).ufunc(x, y)


@operation("and", sharding="..., ... -> ...", commutative=True)
class And(Logic):
    """Whether x and y are both true."""

    x: Operand
    y: Operand
    ufunc = np.logical_and


@operation("or", sharding="..., ... -> ...", commutative=True)
class Or(Logic):
    """Whether x or y is true."""

    x: Operand
    y: Operand
    ufunc = np.logical_or


@operation("not", sharding="... -> ...")
class Not(Op):
    """Whether x is false."""

    x: Operand

    def infer(self) -> TensorType:
        return bool_operand(self.opname, self.x).whole

    def evaluate(self, x: Any) -> Any:
        return np.logical_not(x)


_where: Any = np.where


@operation("where", sharding="..., ..., ... -> ...", sums="x y")
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


@operation("cast", sharding="... -> ...")
class Cast(Op):
    """x converted to `dtype`.

    Between floats to the nearest, halves to even; from float to integer towards zero, undefined
    where the integer cannot hold the value; between integers modulo 2 to the power of the width;
    to bool as x != 0.
    """

    x: Operand
    dtype: str

    def infer(self) -> TensorType:
        dtype(self.dtype)
        return TensorType(self.dtype, self.x.type.shape)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return np.asarray(x).astype(numpy_dtype(self.dtype))
