"""Structure: constants, the end of a function, calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import Error
from ..ir.attributes import Number
from ..ir.core import Function, Module, Op
from ..ir.declare import Operands, operation
from ..ir.dims import DimLike
from ..ir.dtypes import dtype, numpy_dtype
from ..ir.facts import Bound
from ..ir.types import TensorType
from .shapes import number_fits, run_sizes

LARGEST_CONSTANT = 16  # numbers; anything larger belongs in a checkpoint file


@operation("return", pure=False)
class Return(Op):
    """The end of a function, and the values it gives back."""

    values: Operands

    def infer(self) -> tuple[TensorType, ...]:
        return ()


@operation("constant", cheap=True)
class Constant(Op):
    """At most 16 numbers, in row-major order, as a tensor of `shape`."""

    values: tuple[Number, ...]
    shape: tuple[int, ...] = ()
    dtype: str = "f32"

    def infer(self) -> TensorType:
        dtype(self.dtype)
        count = math.prod(self.shape)
        if len(self.values) != count:
            raise Error(f"constant has {len(self.values)} values for the {count} of {self.shape}")
        if count > LARGEST_CONSTANT:
            raise Error(
                f"constant holds at most {LARGEST_CONSTANT} numbers, not {count}; "
                "use full for one repeated value and a checkpoint file for data"
            )
        for value in self.values:
            number_fits(self.opname, value, self.dtype)
        return TensorType(self.dtype, self.shape)

    def repeated(self) -> Number | None:
        same = len({repr(value) for value in self.values}) == 1
        return self.values[0] if same else None

    def bound(self, result: int) -> Bound:
        return "always" if all(map(math.isfinite, self.values)) else "no"

    @np.errstate(over="ignore")
    def evaluate(self) -> Any:
        # integers by themselves: numpy takes those of more than 63 bits for floats
        values = np.array(self.values, object if dtype(self.dtype).is_integer else None)
        return values.astype(numpy_dtype(self.dtype)).reshape(self.shape)


@operation("full", cheap=True)
class Full(Op):
    """One number, repeated to fill `shape`."""

    value: Number
    shape: tuple[DimLike, ...] = ()
    dtype: str = "f32"

    def infer(self) -> TensorType:
        dtype(self.dtype)
        number_fits(self.opname, self.value, self.dtype)
        return TensorType(self.dtype, self.shape)

    def repeated(self) -> Number | None:
        return self.value

    def bound(self, result: int) -> Bound:
        return "always" if math.isfinite(self.value) else "no"

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        return self.attributes | {"shape": results[0].shape}

    @np.errstate(over="ignore")
    def evaluate(self) -> Any:
        return np.full(run_sizes(self.opname, self.shape), self.value, numpy_dtype(self.dtype))


@operation("iota", cheap=True)
class Iota(Op):
    """0, 1, 2, ... up to `size - 1`, as a vector."""

    size: DimLike
    dtype: str = "i32"

    def infer(self) -> TensorType:
        if dtype(self.dtype).kind == "bool":
            raise Error("iota counts in numbers, not in bool")
        return TensorType(self.dtype, (self.size,))

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        return self.attributes | {"size": results[0].shape[0]}

    def evaluate(self) -> Any:
        (size,) = run_sizes(self.opname, (self.size,))
        return np.arange(size).astype(numpy_dtype(self.dtype))


@operation("call", memo=False)
class Call(Op):
    """Another function of the module, defined before this one, applied to the operands.

    Calls with a `stage` are those of a pipeline: each runs on the ranks with that index along the
    mesh axis `pp`. Either all calls of a function have a stage, in increasing order, or none has; a
    value is used by its own stage and the next only.
    """

    records = True
    values: Operands
    callee: Function
    stage: int = -1

    def infer(self) -> tuple[TensorType, ...]:
        if not isinstance(self.callee, Function):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Error(f"call: the callee is a function such as @block, not {self.callee!r}")
        wanted = [arg.type for arg in self.callee.args]
        given = [value.type for value in self.values]
        if wanted != given:
            raise Error(
                f"call: @{self.callee.name} takes ({', '.join(map(str, wanted))}), "
                f"not ({', '.join(map(str, given))})"
            )
        types = [value.type for value in self.callee.returned]
        return tuple(map(_on_one_stage, types) if self.stage >= 0 else types)

    def verify(self, module: Module) -> None:
        """Stages are indices of the axis `pp`, in order, and send values to the next stage."""
        if self.stage < -1:
            raise Error(f"the stage is {self.stage}; stages count from 0, and -1 is none")
        before = self.prev
        while before is not None and not isinstance(before, Call):
            before = before.prev
        last = before.stage if before is not None else self.stage
        if (last < 0) != (self.stage < 0):
            raise Error("either all calls of a function have a stage or none has")
        if self.stage < 0:
            return
        if "pp" not in module.mesh.names:
            raise Error(f"call has stage={self.stage}, but the mesh ({module.mesh}) has no axis pp")
        if self.stage >= module.mesh.size("pp"):
            raise Error(f"call has stage={self.stage}, but the mesh is ({module.mesh})")
        if self.stage < last:
            raise Error(f"call has stage={self.stage} after one with stage={last}; stages rise")
        for value in self.values:
            maker = value.producer
            if isinstance(maker, Call) and maker.stage < self.stage - 1:
                raise Error(
                    f"call with stage={self.stage} uses %{value.name or '_'} of "
                    f"stage={maker.stage}; pass it from stage to stage"
                )


def _on_one_stage(type: TensorType) -> TensorType:
    """The type of a result of a stage: along pp only the ranks of that stage have it."""
    whole = type.global_type
    if "pp" not in whole.varying:
        return type
    return type.part_of(whole.replace(varying=tuple(a for a in whole.varying if a != "pp")))
