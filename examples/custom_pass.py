"""An example of a pass: irc opt model.irc --load examples/custom_pass.py --passes fuse-square."""

from irc import Module, P, Pass, Stats, apply_rules, register, rule
from irc.ops import SquaredRelu


@rule(P.mul(P.relu("x", shared=True), P.relu("x", shared=True)) | P.pow(P.relu("x"), P.full(2)))
def squared_relu(x):
    return SquaredRelu(x)


@register("fuse-square")
class FuseSquare(Pass):
    """relu(x) * relu(x) and relu(x) ** 2 become one squared_relu."""

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, [squared_relu]))
