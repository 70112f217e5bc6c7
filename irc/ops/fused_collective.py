"""A collective together with what transformers do right after it."""

from __future__ import annotations

from ..core import Module, Op, Value
from ..declare import Operand, operation, placeholder
from ..errors import Error
from ..types import Axes, TensorType
from .collective import AllReduce, check_ways, mesh_axes
from .elementwise import Add
from .norm import RmsNorm


@operation("all_reduce_rms_norm")
class AllReduceRmsNorm(Op):
    """The finished sum of x plus the residual, and its rms_norm: (normed, sum), as x both.

    sum = all_reduce(x) + residual; normed = rms_norm(sum, weight). x [..., N] is `{sum tp}` in the
    global view, residual [..., N] and weight [N] are whole. Attributes as those of all_reduce and
    rms_norm.
    """

    x: Operand
    residual: Operand
    weight: Operand
    axis: str
    eps: float = 1e-6
    offset: float = 0.0
    ways: int = 0

    @property
    def axes(self) -> Axes:
        """The mesh axes, slowest first."""
        return mesh_axes(self.opname, self.axis)

    def infer(self) -> tuple[TensorType, ...]:
        stand_ins = tuple(Value(v.type, None, i) for i, v in enumerate(self.operands))
        copy = placeholder(self, stand_ins)
        assert isinstance(copy, AllReduceRmsNorm)
        normed, total = copy.expand()
        if total.type.shape != self.x.type.shape:
            raise Error(
                f"all_reduce_rms_norm: residual is {self.residual.type}, but x {self.x.type}"
            )
        return normed.type, total.type

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, and `ways` agrees with it."""
        check_ways(self, module, self.axes, self.ways)

    def expand(self) -> tuple[Value, ...]:
        total = Add(AllReduce(self.x, axis=self.axis, ways=self.ways), self.residual)
        normed = RmsNorm(total, self.weight, eps=self.eps, offset=self.offset)
        return normed.result, total.result
