"""Elementwise operations: arithmetic, comparison, logic, selection and conversion."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..core import Op
from ..declare import Operand, operation
from ..dtypes import dtype, numpy_dtype
from ..errors import Error
from ..types import TensorType
from .shapes import broadcast, same_dtype


class Binary(Op):
    """Base of the arithmetic on two operands of one dtype, which broadcast as in numpy."""

    __slots__ = ()
    ufunc: ClassVar[Any]
    x: Operand
    y: Operand

    def infer(self) -> TensorType:
        kind = same_dtype(self.opname, self.x, self.y)
        if kind == "bool":
            raise Error(f"{self.opname} takes numbers; for bool use and, or, not, where")
        return TensorType(kind, broadcast(self.x.type.shape, self.y.type.shape))

    def evaluate(self, x: Any, y: Any) -> Any:
        return type(self).ufunc(x, y)


@operation("add", sharding="..., ... -> ...", sums="x y", commutative=True)
class Add(Binary):
    """x + y."""

    x: Operand
    y: Operand
    ufunc = np.add


@operation("mul", sharding="..., ... -> ...", sums="x | y", commutative=True)
class Mul(Binary):
    """x * y."""

    x: Operand
    y: Operand
    ufunc = np.multiply


@operation("silu", sharding="... -> ...")
class Silu(Op):
    """x * sigmoid(x), also called swish (Elfwing et al., 2017)."""

    x: Operand

    def infer(self) -> TensorType:
        return self.x.type.whole

    def evaluate(self, x: Any) -> Any:
        return x / (1 + np.exp(-x))


@operation("neg", sharding="... -> ...", sums="x")
class Neg(Op):
    """-x."""

    x: Operand

    def infer(self) -> TensorType:
        return self.x.type.whole

    def evaluate(self, x: Any) -> Any:
        return -x


@operation("cast", sharding="... -> ...")
class Cast(Op):
    """x converted to another dtype: to nearest even between floats, towards zero to integers."""

    x: Operand
    dtype: str

    def infer(self) -> TensorType:
        dtype(self.dtype)
        return self.x.type.whole.replace(dtype=self.dtype)

    def evaluate(self, x: Any) -> Any:
        return x.astype(numpy_dtype(self.dtype))
