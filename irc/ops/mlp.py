"""The gated feed-forward of transformers, as one operation."""

from __future__ import annotations

from typing import Literal, TypeAlias, cast, get_args

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, optional
from .activation import Gelu, QuickGelu, Relu, Sigmoid, Silu, SquaredRelu
from .elementwise import Mul
from .matmul import Linear

Act: TypeAlias = Literal[
    "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "sigmoid"
]


@operation("gated_mlp", sharding="... k!, n k, n k, n, n -> ... n", sums="up up_bias")
class GatedMlp(Op):
    """act(x · gateᵀ + gate_bias) * (x · upᵀ + up_bias).

    x [..., K], gate and up [N, K], the biases [N]; result [..., N]. Shazeer, 2020 (silu: SwiGLU,
    gelu: GEGLU, sigmoid: GLU).
    """

    x: Operand
    gate: Operand
    up: Operand
    gate_bias: OptionalOperand = optional()
    up_bias: OptionalOperand = optional()
    act: Act = "silu"

    def expand(self) -> Op:
        if self.gate.type.shape != self.up.type.shape:
            raise Error(f"gate is {self.gate.type} and up {self.up.type}; both are [N, K]")
        gate = Linear(self.x, self.gate, bias=self.gate_bias)
        return Mul(activation(self.act, gate), Linear(self.x, self.up, bias=self.up_bias))


def activation(act: Act, x: Value | Op) -> Op:
    """The activation that a word names."""
    match act:
        case "silu":
            return Silu(x)
        case "gelu":
            return Gelu(x)
        case "gelu_tanh":
            return Gelu(x, approximate="tanh")
        case "quick_gelu":
            return QuickGelu(x)
        case "relu":
            return Relu(x)
        case "squared_relu":
            return SquaredRelu(x)
        case "sigmoid":
            return Sigmoid(x)


def act_of(op: Op) -> Act | None:
    """The word for an activation; None for other operations."""
    is_tanh = isinstance(op, Gelu) and op.approximate == "tanh"
    word = "gelu_tanh" if is_tanh else op.opname
    return cast("Act", word) if word in get_args(Act) else None
