"""The pass my-pass: x * sigmoid(x) becomes silu(x)."""

from irc import Module, Op, P, Pass, Stats, Value, apply_rules, register, rule
from irc.ops import Silu


# A rule is a pattern, and a function that builds what takes its place. "x" captures a value; where
# it stands twice, both must be the same value. A product matches in both orders of its operands.
# The sigmoid may have no other use: `P.sigmoid("x", shared=True)` would permit some.
@rule(P.mul("x", P.sigmoid("x")))
def silu(x: Value) -> Op:
    return Silu(x)


# The name is what --passes and --pipeline take. Annotated fields of the class would be options:
# `least: int = 0` is my-pass{least=128}.
@register("my-pass")
class MyPass(Pass):
    """x * sigmoid(x) becomes silu(x)."""

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, [silu]))
