"""all_reduce fused with the residual addition after it, and with the norm after that."""

from __future__ import annotations

from ..errors import Error
from ..ir.core import Module, Value
from ..ir.declare import Operand, expanded_results, operation, operation_base, placeholder
from ..ir.facts import Bound
from ..ir.types import TensorType
from .collective import AllReduce, OverAxes, check_group_size
from .elementwise import Add
from .norm import RmsNorm


@operation_base
class ReducedSum(OverAxes):
    """Base of the operations on all_reduce(x) + residual, which have the shape of x."""

    __slots__ = ()
    x: Operand
    residual: Operand
    group_size: int

    def infer(self) -> tuple[TensorType, ...]:
        stand_ins = tuple(Value(v.type, None, i) for i, v in enumerate(self.operands))
        results = expanded_results(placeholder(self, stand_ins).expand())
        if results[-1].type.shape != self.x.type.shape:
            raise Error(f"{self.opname}: residual is {self.residual.type}, but x {self.x.type}")
        return tuple(value.type for value in results)

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, and `group_size` agrees with it."""
        check_group_size(self, module, self.axes, self.group_size)
        if self.group_size > 1:
            x = Value(self.x.type, None, 0)
            AllReduce(x, axis=self.axis, group_size=self.group_size).verify(module)


@operation("all_reduce_add")
class AllReduceAdd(ReducedSum):
    """The complete sum of x plus the residual: all_reduce(x) + residual, as x.

    x [..., N] is `{sum tp}` in the global view, residual [..., N] is replicated. Attributes as of
    all_reduce.
    """

    axis: str
    group_size: int = 0

    def expand(self) -> Add:
        total = AllReduce(self.x, axis=self.axis, group_size=self.group_size)
        return Add(total, self.residual)


@operation("all_reduce_rms_norm")
class AllReduceRmsNorm(ReducedSum):
    """The complete sum of x plus the residual, and its rms_norm: (normed, sum), as x both.

    sum = all_reduce(x) + residual; normed = rms_norm(sum, weight). x [..., N] is `{sum tp}` in the
    global view, residual [..., N] and weight [N] are replicated. Attributes as of all_reduce and
    rms_norm.
    """

    weight: Operand
    axis: str
    eps: float = 1e-6
    offset: float = 0.0
    group_size: int = 0

    def bound(self, result: int) -> Bound:
        """The sum may overflow; its norm is bounded as rms_norm is."""
        return "always" if result == 0 and self.eps > 0 else "no"

    def expand(self) -> tuple[Value, ...]:
        total = AllReduceAdd(self.x, self.residual, axis=self.axis, group_size=self.group_size)
        normed = RmsNorm(total, self.weight, eps=self.eps, offset=self.offset)
        return normed.result, total.result
