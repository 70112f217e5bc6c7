"""Operations of the global view only: taking a shard, topk and max over a sharded dimension."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..errors import Error
from ..ir.core import Module, Op
from ..ir.declare import Operand, operation
from ..ir.types import TensorType
from .collective import Exchange, OverAxes
from .reduce import Topk
from .shapes import number_operand, position


@operation("shard_slice", moves_data=True, selects="x")
class ShardSlice(Exchange):
    """Every rank's shard along `dim` of a value that all hold; nothing is sent.

    `n` -> `n@tp`. Only in the global view: localize writes a gather by rank.
    """

    dim: int
    group_size: int = 0
    scatters: ClassVar = "dim"

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, in the global view."""
        Exchange.verify(self, module)
        _global_only(self, module)


@operation("sharded_topk")
class ShardedTopk(OverAxes):
    """topk along `dim`, which is sharded over `axis`: only k candidates of each rank are sent.

    x [..., n@tp, ...] -> values and positions (i32) [..., k, ...], on every rank; order and
    positions as topk has them. Only in the global view: localize writes a topk per rank, two
    all_gathers and a topk of the candidates.
    """

    x: Operand
    k: int
    axis: str
    dim: int = -1

    def infer(self) -> tuple[TensorType, ...]:
        values, places = Topk.infer(self)  # type: ignore[arg-type]
        x = self.x.type
        at = _sharded_dim(self, x, self.dim, "topk")
        if not isinstance(x.shape[at], int):
            raise Error(
                f"sharded_topk over {self.axis}: dimension {at} of {x} has no fixed size; "
                "gather it and use topk"
            )
        rest = (*x.axes[:at], (), *x.axes[at + 1 :])
        return values.replace(axes=rest), places.replace(axes=rest)

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, in the global view."""
        module.mesh.group_size(self.axes)
        _global_only(self, module)

    def evaluate(self, x: Any) -> Any:
        return Topk.evaluate(self, x)  # type: ignore[arg-type]


@operation("sharded_max")
class ShardedMax(OverAxes):
    """The largest element along `dim`, which is sharded over `axis`; NaN where there is one.

    x [..., n@tp, ...] -> [..., 1, ...], on every rank. Only in the global view: localize writes a
    reduce_max per rank and an all_reduce.
    """

    x: Operand
    axis: str
    dim: int = -1

    def infer(self) -> TensorType:
        x = number_operand(self.opname, self.x)
        at = _sharded_dim(self, x, self.dim, "reduce_max")
        shape, axes = (*x.shape[:at], 1, *x.shape[at + 1 :]), (*x.axes[:at], (), *x.axes[at + 1 :])
        return x.replace(shape=shape, axes=axes)

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, in the global view."""
        module.mesh.group_size(self.axes)
        _global_only(self, module)

    def evaluate(self, x: Any) -> Any:
        return np.max(x, axis=self.dim, keepdims=True)


def _sharded_dim(op: OverAxes, x: TensorType, dim: int, instead: str) -> int:
    """The position of a dimension, which must be sharded over the axes of the operation."""
    at = position(op.opname, dim, x.ndim)
    if x.partial or x.axes[at] != op.axes:
        raise Error(
            f"{op.opname} over {op.axis}: the operand is {x}, but dimension {at} must be "
            f"sharded over it and nothing partial; use {instead} where it is replicated"
        )
    return at


def _global_only(op: Op, module: Module) -> None:
    if module.local:
        raise Error(f"{op.opname} is for the global view only; localize lowers it")
