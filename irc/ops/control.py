"""Structure: constants, the end of a function, calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..attributes import Number
from ..core import Function, Op
from ..declare import Operands, operation
from ..dims import DimLike
from ..dtypes import numpy_dtype
from ..errors import Error
from ..types import TensorType

LARGEST_CONSTANT = 16  # numbers; anything larger belongs in a checkpoint file


@operation("return", pure=False)
class Return(Op):
    """The end of a function, and the values it gives back."""

    values: Operands

    def infer(self) -> tuple[TensorType, ...]:
        return ()


@operation("constant")
class Constant(Op):
    """At most 16 numbers, in row-major order, as a tensor of `shape`."""

    values: tuple[Number, ...]
    shape: tuple[int, ...] = ()
    dtype: str = "f32"

    def infer(self) -> TensorType:
        count = int(np.prod(self.shape, dtype=np.int64))
        if len(self.values) != count:
            raise Error(f"constant has {len(self.values)} values for the {count} of {self.shape}")
        if count > LARGEST_CONSTANT:
            raise Error(
                f"constant holds at most {LARGEST_CONSTANT} numbers, not {count}; "
                "use full for one repeated value and a checkpoint file for data"
            )
        return TensorType(self.dtype, self.shape)

    def evaluate(self) -> Any:
        return np.array(self.values, numpy_dtype(self.dtype)).reshape(self.shape)


@operation("full")
class Full(Op):
    """One number, repeated to fill `shape`."""

    value: Number
    shape: tuple[DimLike, ...] = ()
    dtype: str = "f32"

    def infer(self) -> TensorType:
        return TensorType(self.dtype, self.shape)

    def evaluate(self) -> Any:
        return np.full(self.shape, self.value, numpy_dtype(self.dtype))


@operation("call", memo=False)
class Call(Op):
    """Another function of the module, defined before this one, applied to the operands."""

    values: Operands
    callee: Function

    def infer(self) -> tuple[TensorType, ...]:
        wanted = [arg.type for arg in self.callee.args]
        given = [value.type for value in self.values]
        if wanted != given:
            raise Error(
                f"@{self.callee.name} takes ({', '.join(map(str, wanted))}), "
                f"not ({', '.join(map(str, given))})"
            )
        return tuple(value.type for value in self.callee.returned)
