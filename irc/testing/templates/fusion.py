"""The pass my-pass: silu(x · gate) * (x · up) becomes one gated_mlp."""

from irc import Module, Op, P, Pass, Stats, Value, apply_rules, register, rule
from irc.ops import GatedMlp
from irc.rewrite import decline


# The pattern takes more than the rule can replace, so that `irc opt --why-not my-pass` tells its
# user what to change. A type holds dtype, shape and axes of ranks, and equal types are one object.
# `P.linear("x", "up", bias=P.maybe("b"))` would match with or without a bias; here, only without.
@rule(P.mul(P.silu(P.linear("x", "gate")), P.linear("other", "up")))
def gated_mlp(x: Value, gate: Value, other: Value, up: Value) -> Op | None:
    if other is not x:
        return decline("gate and up read different values")
    if gate.type is not up.type:
        return decline(f"gate is {gate.type} and up {up.type}, not weights of one type")
    return GatedMlp(x, gate, up, act="silu")


@register("my-pass")
class MyPass(Pass):
    """silu(x · gate) * (x · up) becomes one gated_mlp."""

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, [gated_mlp]))
