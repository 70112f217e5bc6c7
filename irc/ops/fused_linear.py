"""A linear with what stands around it: the norm in front, activation and additions behind."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from ..errors import Error
from ..ir.core import Module, Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, optional, placeholder
from ..ir.expansion import expansion
from ..ir.types import TensorType
from .collective import AllReduce, check_group_size, mesh_axes
from .elementwise import Add
from .fused_collective import AllReduceAdd
from .matmul import Linear
from .mlp import Act, GatedMlp, activation
from .norm import RmsNorm

MaybeAct: TypeAlias = Literal["", Act]
_RULE = "... k!, n k, n, n k, n, k, ... n -> ... n"


@operation("fused_linear")
class FusedLinear(Op):
    """all_reduce(act(h · gateᵀ + gate_bias) * (h · weightᵀ + bias)) + residual, of h = rms_norm(x).

    Each part is optional: without `norm`, h is x; without `gate` there is no product, and `act` is
    applied to the linear; without `axis` nothing is summed over ranks. x [..., K], weight and gate
    [N, K], the biases [N], norm [K] (the weight of rms_norm, which `eps` and `offset` belong to),
    residual and result [..., N]. Every part is rounded. The expansion takes one part off, so that a
    backend without a kernel for all of them may have one for the rest.
    """

    records = True

    x: Operand
    weight: Operand
    bias: OptionalOperand = optional()
    gate: OptionalOperand = optional()
    gate_bias: OptionalOperand = optional()
    norm: OptionalOperand = optional()
    residual: OptionalOperand = optional()
    act: MaybeAct = ""
    eps: float = 1e-6
    offset: float = 0.0
    axis: str = ""
    group_size: int = 0

    def sharding_rule(self) -> str | None:
        """None over an axis, where the expansion gives the results their types."""
        return None if self.axis else _RULE

    def infer(self) -> TensorType:
        if self.gate is None and self.gate_bias is not None:
            raise Error("fused_linear has a gate_bias, but no gate")
        if self.gate is not None and not self.act:
            raise Error("fused_linear has a gate, so it needs an act")
        own = bool(self.axis) or any(v.type.of is not None for v in self.operands)
        types = [v.type if own else v.type.replicated for v in self.operands]
        stand_ins = tuple(Value(type, None, i) for i, type in enumerate(types))
        copy = placeholder(self, stand_ins)
        assert isinstance(copy, FusedLinear)
        return copy.expand().result.type

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, and `group_size` agrees with it."""
        if self.axis:
            check_group_size(self, module, mesh_axes(self.opname, self.axis), self.group_size)
            for part in expansion(self).ops:
                part.verify(module)

    def expand(self) -> Op:
        """The norm is taken off first, then what is done last."""
        parts = LinearParts.of(self)
        if self.norm is not None:
            x = RmsNorm(self.x, self.norm, eps=self.eps, offset=self.offset)
            return replace(parts, x=x.result, norm=None, eps=1e-6, offset=0.0).simplest()
        if self.axis or self.residual is not None:
            product = replace(parts, residual=None, axis="", group_size=0).simplest()
            return self._added(product)
        if self.gate is not None or not self.act:
            return parts.simplest()
        return activation(self.act, replace(parts, act="").simplest())

    def _added(self, product: Op) -> Op:
        """The sum of a product over the axis, if any, and the residual, if any."""
        over: Any = {"axis": self.axis, "group_size": self.group_size}
        if self.residual is None:
            return AllReduce(product, **over)
        shape = product.result.type
        if self.residual.type.shape != shape.shape:
            raise Error(f"fused_linear: residual is {self.residual.type}, but the product {shape}")
        if self.axis:
            return AllReduceAdd(product, self.residual, **over)
        return Add(product, self.residual)


@dataclass(frozen=True)
class LinearParts:
    """What a linear, gated_mlp or fused_linear consists of, by the names of fused_linear."""

    x: Value
    weight: Value
    bias: Value | None = None
    gate: Value | None = None
    gate_bias: Value | None = None
    norm: Value | None = None
    residual: Value | None = None
    act: MaybeAct = ""
    eps: float = 1e-6
    offset: float = 0.0
    axis: str = ""
    group_size: int = 0

    @staticmethod
    def of(op: Linear | GatedMlp | FusedLinear) -> LinearParts:
        """The parts of an operation."""
        if isinstance(op, Linear):
            return LinearParts(op.x, op.weight, op.bias)
        if isinstance(op, GatedMlp):
            biases = op.up_bias, op.gate_bias
            return LinearParts(op.x, op.up, biases[0], op.gate, biases[1], act=op.act)
        return LinearParts(*(getattr(op, field.name) for field in fields(LinearParts)))

    def simplest(self) -> Linear | GatedMlp | FusedLinear:
        """A linear or gated_mlp where that has all parts, else a fused_linear."""
        around = self.norm is not None or self.residual is not None or self.axis
        if around or (self.act and self.gate is None):
            named: Any = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
            return FusedLinear(self.x, self.weight, **named)
        if self.gate is None:
            return Linear(self.x, self.weight, bias=self.bias)
        biases = {"gate_bias": self.gate_bias, "up_bias": self.bias}
        return GatedMlp(self.x, self.gate, self.weight, act=self.act or "silu", **biases)
