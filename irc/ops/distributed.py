"""Operations of the global view only: taking a shard, topk over a sharded dimension."""

from __future__ import annotations

from typing import Any, ClassVar

from ..errors import Error
from ..ir.core import Module, Op
from ..ir.declare import Operand, operation
from ..ir.types import TensorType
from .collective import Exchange, OverAxes
from .reduce import Topk
from .shapes import position


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
        at = position(self.opname, self.dim, x.ndim)
        if x.partial or x.axes[at] != self.axes:
            raise Error(
                f"sharded_topk over {self.axis}: the operand is {x}, but dimension {at} must be "
                "sharded over it and nothing partial; use topk where it is replicated"
            )
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


def _global_only(op: Op, module: Module) -> None:
    if module.local:
        raise Error(f"{op.opname} is for the global view only; localize lowers it")
