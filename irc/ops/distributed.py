"""Global-view operations that localize writes in others: taking parts, choosing across parts."""

from __future__ import annotations

from typing import Any

from ..core import Module, Op
from ..declare import Operand, operation
from ..errors import Error
from ..types import Axes, TensorType
from .collective import Exchange, mesh_axes
from .reduce import Topk
from .shapes import not_above, number_operand, position


@operation("shard_slice")
class ShardSlice(Exchange):
    """Every rank's own part along `dim` of a value that all hold; nothing is sent.

    `n` -> `n@tp`. Only in the global view: localize writes a gather by rank.
    """

    x: Operand
    axis: str
    dim: int
    ways: int = 0

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        return self.scattered(self.replicated(x, axes), axes, self.dim)

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, in the global view."""
        Exchange.verify(self, module)
        _global_only(self, module)


@operation("sharded_topk")
class ShardedTopk(Op):
    """topk along `dim`, which is split over `axis`: only k candidates of each rank are sent.

    x [..., n@tp, ...] -> values and positions (i32) [..., k, ...], on every rank; order and
    positions as topk has them. Only in the global view: localize writes a topk per rank, two
    all_gathers and a topk of the candidates.
    """

    x: Operand
    k: int
    axis: str
    dim: int = -1

    @property
    def axes(self) -> Axes:
        """The mesh axes, slowest first."""
        return mesh_axes(self.opname, self.axis)

    def infer(self) -> tuple[TensorType, ...]:
        x, axes = number_operand(self.opname, self.x), self.axes
        at = position(self.opname, self.dim, x.rank)
        not_above(self.opname, 1, self.k, "1 element at least and k:")
        not_above(self.opname, self.k, x.shape[at], "k")
        x = self.x.type
        if x.partial or x.axes[at] != axes:
            raise Error(
                f"sharded_topk over {self.axis}: the operand is {x}, but dimension {at} must be "
                "split over it and nothing pending; use topk where it is whole"
            )
        shape = (*x.shape[:at], self.k, *x.shape[at + 1 :])
        rest = (*x.axes[:at], (), *x.axes[at + 1 :])
        return TensorType(x.dtype, shape, rest), TensorType("i32", shape, rest)

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, in the global view."""
        module.mesh.ways(self.axes)
        _global_only(self, module)

    def evaluate(self, x: Any) -> Any:
        return Topk.evaluate(self, x)  # type: ignore[arg-type]


def _global_only(op: Op, module: Module) -> None:
    if module.local:
        raise Error(f"{op.opname} is for the global view only; localize writes what one rank does")
