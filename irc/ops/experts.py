"""A mixture of experts between the router and the sum, as one operation."""

from __future__ import annotations

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, optional
from ..ir.dims import DimLike
from .control import Full
from .elementwise import Add, Clip, Mul
from .matmul import Matmul
from .mlp import Act, activation
from .moe import MoeCombine, MoeDispatch, Routed
from .shape import Transpose


@operation("experts", sums="weights", safe_values={"slots": -1})
class Experts(Routed):
    """Per token, the weighted sum of the feed-forwards of its experts: [T, O].

    x [T, H]; chosen, slots and weights [T, K], `first`, `parts` and `capacity` as of moe_dispatch
    and moe_combine. up and gate [E, F, H], down [E, O, F]; biases [E, 1, features]. An expert is
    act(gate · x + gate_bias) * (up · x + up_bias + offset), without gate act(up · x + up_bias),
    then the product with down, plus down_bias. With `limit` what act takes is at most that, and so
    is |up · x + up_bias| (gpt-oss: quick_gelu, limit 7, offset 1).
    """

    x: Operand
    chosen: Operand
    slots: Operand
    weights: Operand
    up: Operand
    down: Operand
    first: OptionalOperand = optional()
    gate: OptionalOperand = optional()
    gate_bias: OptionalOperand = optional()
    up_bias: OptionalOperand = optional()
    down_bias: OptionalOperand = optional()
    act: Act = "silu"
    limit: float = 0.0
    offset: float = 0.0
    parts: int = 1
    capacity: DimLike = 0

    def sharding_rule(self) -> str:
        """A rank has all experts; what is added to the sum over F is not sharded with it."""
        t, f = self.token_word, "f!" if self.down_bias is not None else "f"
        row, bias = f"{t} k", f"e! 1 {f}"
        inputs = f"{t} h!, {row}, {row}, {row}, e! {f} h!, e! o {f}"
        return f"{inputs}, , e! {f} h!, {bias}, {bias}, e! 1 o -> {t} o"

    def local_rule(self) -> str | None:
        """One rank has the experts from `first` on."""
        rule = Routed.local_rule(self)
        return rule and rule.replace("e!", "e~")

    def expand(self) -> Op:
        shape = self.up.type.shape
        if len(shape) != 3 or not isinstance(shape[0], int):
            raise Error(f"experts takes up [experts, features, inputs], not {self.up.type}")
        if self.gate is None and (self.gate_bias or self.limit or self.offset):
            raise Error("experts: gate_bias, limit and offset are those of experts with a gate")
        buffer = MoeDispatch(
            *(self.x, self.chosen, self.slots),
            experts=shape[0],
            first=self.first,
            parts=self.parts,
            capacity=self.capacity,
        )
        done = self._product(self._hidden(buffer), "down", self.down, self.down_bias)
        return MoeCombine(
            *(done, self.chosen, self.slots, self.weights), first=self.first, parts=self.parts
        )

    def _hidden(self, buffer: Op) -> Op:
        up = self._product(buffer, "up", self.up, self.up_bias)
        if self.gate is None:
            return activation(self.act, up)
        if self.gate.type.shape != self.up.type.shape:
            raise Error(f"experts: gate is {self.gate.type}, but up {self.up.type}")
        gate = self._product(buffer, "gate", self.gate, self.gate_bias)
        return self.gated(gate.result, up.result)

    def gated(self, gate: Value, up: Value) -> Op:
        """The activation of one product times the other, within the limits."""
        if self.limit:
            gate = Clip(gate, high=self.limit).result
            up = Clip(up, low=-self.limit, high=self.limit).result
        if self.offset:
            up = Add(up, Full(value=self.offset, dtype=up.type.dtype)).result
        return Mul(activation(self.act, gate), up)

    def _product(self, x: Op, name: str, weight: Value, bias: Value | None) -> Op:
        """x [experts, places, inputs] times the weights of every expert, and the bias."""
        if weight.type.ndim != 3 or weight.type.shape[0] != self.up.type.shape[0]:
            raise Error(f"experts: {name} is {weight.type}, but up {self.up.type}")
        product = Matmul(x, Transpose(weight, order=(0, 2, 1)))
        if bias is None:
            return product
        experts, outputs, _ = weight.type.shape
        if bias.type.shape != (experts, 1, outputs):
            raise Error(
                f"experts: expected {name}_bias [{experts}, 1, {outputs}], found {bias.type}"
            )
        return Add(product, bias)
