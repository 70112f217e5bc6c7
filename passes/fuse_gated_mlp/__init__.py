"""`fuse-gated-mlp`: the gated feed-forward of a transformer becomes one operation."""

from __future__ import annotations

from typing import get_args

from irc.ir.core import Module, Op, Value
from irc.ops import GatedMlp
from irc.ops.mlp import Act, act_of
from irc.pipeline import Pass, Stats, register
from irc.rewrite import P, apply_rules, decline, rule

from ..shared.parameters import same
from .activations import ACTIVATIONS
from .merged import separate_merged

_NAME = "fuse-gated-mlp"
_ACTS = frozenset(get_args(Act))
_GATE = P.linear("x", "gate", bias=P.maybe("gate_bias"))
_ACTIVATED = (
    P.silu(_GATE)
    | P.gelu(_GATE)
    | P.quick_gelu(_GATE)
    | P.relu(_GATE)
    | P.squared_relu(_GATE)
    | P.sigmoid(_GATE)
).capture("activation")


@rule(P.mul(_ACTIVATED, P.linear("y", "up", bias=P.maybe("up_bias"))))
def gated_mlp(
    x: Value,
    y: Value,
    gate: Value,
    up: Value,
    gate_bias: Value | None,
    up_bias: Value | None,
    activation: Op,
) -> Op | None:
    """act(x · gate) * (x · up) is a gated_mlp, unless one side of the product broadcasts."""
    if not same(x, y):
        return decline(_difference(x, y))
    shapes = [f"[{', '.join(map(str, weight.type.shape))}]" for weight in (gate, up)]
    if shapes[0] != shapes[1]:
        return decline(f"the rule takes two weights of one shape, not {' and '.join(shapes)}")
    act = act_of(activation)
    assert act is not None
    return GatedMlp(x, gate, up, gate_bias=gate_bias, up_bias=up_bias, act=act)


def _difference(x: Value, y: Value) -> str:
    """Why gate and up have no common input."""
    producers = {v.producer.opname if v.producer is not None else "" for v in (x, y)}
    if producers == {"dequantize"}:
        return "gate and up quantize their input by different scales; give both the same scale"
    return "gate and up have different inputs"


@register(_NAME)
class FuseGatedMlp(Pass):
    """act(x · gate) * (x · up) becomes one gated_mlp, biases included.

    Quantized weights keep their own scales. Activations written in simpler operations, such as
    x * sigmoid(x), and with `merged` linears of gate and up together are recognised.
    """

    merged: bool = True

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, ACTIVATIONS))
        if self.merged:
            separate_merged(module, _NAME, _ACTS, stats)
        stats.update(apply_rules(module, [gated_mlp]))
