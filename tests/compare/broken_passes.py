"""Passes with a planted bug: each rewrites every place that it finds, one of them wrongly.

Load this file with `--load`, or with `load_file` inside `restored_registries()`. Every rewrite has
a number, as those of irc's passes: exactly one of them breaks the model.
"""

from irc import Module, Pass, Stats, ops, register
from irc.ir.core import Op
from irc.ir.declare import REGISTRY
from irc.ops import Add, AddLayerNorm, AddRmsNorm, Full, GatedMlp, LayerNorm, Linear, Mul, RmsNorm
from irc.rewrite import erase_dead, permit


def is_inside(op: Op, scope: str) -> bool:
    """Whether an operation is in a scope."""
    return op.loc is not None and f"{op.loc.scope}.".startswith(f"{scope}.")


def replace(old: Op, *new: Op) -> None:
    """Put operations in the place of one; the last one has its result."""
    assert old.parent is not None
    for op in new:
        old.parent.insert(op, old).loc = old.loc
    old.result.replace_by(new[-1].result)
    old.erase()


@register("broken-fuse-norm")
class BrokenFuseNorm(Pass):
    """A copy of fuse-norm: in one layer the residual stream goes on without the addition."""

    scope: str

    def run(self, module: Module, stats: Stats) -> None:
        for norm in [op for op in module.ops() if isinstance(op, (RmsNorm, LayerNorm))]:
            total = norm.x.producer
            if not isinstance(total, Add) or total.x.type is not total.y.type:
                continue
            if permit(self.name, norm) and total.parent is not None:
                fused = AddRmsNorm if isinstance(norm, RmsNorm) else AddLayerNorm
                named = dict(list(norm.named_operands())[1:])
                new: Op = fused(total.x, total.y, **named, **norm.attributes)
                total.parent.insert(new, total).loc = norm.loc
                rest = total.x if is_inside(norm, self.scope) else new.results[1]
                norm.result.replace_by(new.results[0])
                total.result.replace_by(rest)
                norm.erase()
                erase_dead(total)


@register("broken-fuse-gated-mlp")
class BrokenFuseGatedMlp(Pass):
    """A copy of fuse-gated-mlp: in one layer gate and up are exchanged."""

    scope: str

    def run(self, module: Module, stats: Stats) -> None:
        for product in [op for op in module.ops() if isinstance(op, Mul)]:
            silu, up = product.x.producer, product.y.producer
            gate = silu.x.producer if isinstance(silu, ops.Silu) else None
            if isinstance(gate, Linear) and isinstance(up, Linear) and permit(self.name, product):
                weights = [gate.weight, up.weight]
                weights = weights[::-1] if is_inside(product, self.scope) else weights
                replace(product, GatedMlp(gate.x, *weights, act="silu"))


class Rebuild(Pass):
    """Every operation of a name is built anew; those in one scope become `wrong(op)`."""

    def rebuild(self, module: Module, opname: str, scope: str) -> None:
        """Rewrite the module."""
        for op in [op for op in module.ops() if op.opname == opname]:
            if permit(self.name, op):
                new = self.wrong(op) if is_inside(op, scope) else [op.rebuilt(op.operands)]
                replace(op, *new)

    def wrong(self, op: Op) -> list[Op]:
        """What takes the place of an operation in the scope."""
        raise NotImplementedError


@register("broken-attribute")
class BrokenAttribute(Rebuild):
    """In one scope an attribute has another value."""

    op: str
    scope: str
    attribute: str
    value: float

    def run(self, module: Module, stats: Stats) -> None:
        self.rebuild(module, self.op, self.scope)

    def wrong(self, op: Op) -> list[Op]:
        is_flag = isinstance(op.attributes[self.attribute], bool)
        value = bool(self.value) if is_flag else self.value
        return [op.rebuilt(op.operands, **{self.attribute: value})]


@register("broken-activation")
class BrokenActivation(Rebuild):
    """In one scope another operation takes the place."""

    op: str
    scope: str
    other: str

    def run(self, module: Module, stats: Stats) -> None:
        self.rebuild(module, self.op, self.scope)

    def wrong(self, op: Op) -> list[Op]:
        return [REGISTRY[self.other](*op.operands)]


@register("broken-all-reduce")
class BrokenAllReduce(Rebuild):
    """In one scope all_reduce gives a mean of two ranks in place of a sum."""

    scope: str

    def run(self, module: Module, stats: Stats) -> None:
        self.rebuild(module, "all_reduce", self.scope)

    def wrong(self, op: Op) -> list[Op]:
        new, half = op.rebuilt(op.operands), Full(value=0.5, dtype=op.result.type.dtype)
        return [new, half, Mul(new.result, half.result)]


@register("broken-fold")
class BrokenFold(Pass):
    """Additions are built anew; the first of one layer is folded into its first operand."""

    scope: str

    def run(self, module: Module, stats: Stats) -> None:
        folded = False
        for op in [op for op in module.ops() if isinstance(op, Add)]:
            if permit(self.name, op):
                if not folded and op.loc is not None and op.loc.scope == self.scope:
                    folded = True
                    op.result.replace_by(op.x)
                    op.erase()
                else:
                    replace(op, op.rebuilt(op.operands))
