"""all_reduce fused with the residual addition and the norm after it."""

from __future__ import annotations

from ..errors import Error
from ..ir.core import Module, Value
from ..ir.declare import Operand, operation, placeholder
from ..ir.facts import Bound
from ..ir.types import TensorType
from .collective import AllReduce, OverAxes, check_group_size
from .elementwise import Add
from .norm import RmsNorm


@operation("all_reduce_rms_norm")
class AllReduceRmsNorm(OverAxes):
    """The complete sum of x plus the residual, and its rms_norm: (normed, sum), as x both.

    sum = all_reduce(x) + residual; normed = rms_norm(sum, weight). x [..., N] is `{sum tp}` in the
    global view, residual [..., N] and weight [N] are replicated. Attributes as of all_reduce and
    rms_norm.
    """

    x: Operand
    residual: Operand
    weight: Operand
    axis: str
    eps: float = 1e-6
    offset: float = 0.0
    group_size: int = 0

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

    def bound(self, result: int) -> Bound:
        """The sum may overflow; its norm is bounded as rms_norm is."""
        return "always" if result == 0 and self.eps > 0 else "no"

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, and `group_size` agrees with it."""
        check_group_size(self, module, self.axes, self.group_size)
        if self.group_size > 1:
            x = Value(self.x.type, None, 0)
            AllReduce(x, axis=self.axis, group_size=self.group_size).verify(module)

    def expand(self) -> tuple[Value, ...]:
        total = Add(AllReduce(self.x, axis=self.axis, group_size=self.group_size), self.residual)
        normed = RmsNorm(total, self.weight, eps=self.eps, offset=self.offset)
        return normed.result, total.result
