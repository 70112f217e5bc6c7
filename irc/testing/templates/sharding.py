"""The pass my-pass: two sums over ranks that are added become one sum of the terms."""

from irc import Module, P, Pass, Stats, Value, apply_rules, register, rule
from irc.ops import Add, AllReduce
from irc.rewrite import decline


# A type such as f32[B, 8@tp] is sharded over the mesh axis tp; f32[B, 8]{sum tp} is a partial sum,
# of which every rank has a term. `type.axes` has the axes of each dimension, `type.partial` those
# of the sum, and `module.mesh` their sizes. Sums may be joined; `op="max"` would be another thing.
@rule(
    P.add(
        P.all_reduce("a", op="sum").capture("first"), P.all_reduce("b", op="sum").capture("second")
    )
)
def one_sum(a: Value, b: Value, first: AllReduce, second: AllReduce) -> AllReduce | None:
    if first.attributes != second.attributes:
        return decline(f"the sums are over {first.axis} and {second.axis}")
    if a.type is not b.type:
        return decline(f"the terms are {a.type} and {b.type}")
    return first.rebuilt((Add(a, b).result,))


@register("my-pass")
class MyPass(Pass):
    """Two sums over ranks that are added become one sum of the terms."""

    # A compilation leaves a "global" pass out where modules are localized, and an "unsharded" one
    # where they are sharded, too. Behind `localize`, shapes are those of one rank, and
    # `type.global_type` has the axes.
    view = "any"

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, [one_sum]))
