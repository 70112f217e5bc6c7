"""Passes, each with one mistake: what `check_pass` has to find."""

from irc import Module, Op, P, Pass, Stats, Value, apply_rules, register, rule
from irc.ops import Abs, Add, Cast, GatedMlp, Linear, Maximum, Relu, RmsNorm, Silu
from irc.rewrite import permit, replace

TWICE = P.neg(P.neg("x"))


@rule(P.mul(P.silu(P.linear("x", "gate")), P.linear("x", "up", bias=P.maybe("bias"))))
def without_bias(x: Value, gate: Value, up: Value, bias: Value | None) -> Op | None:
    return GatedMlp(x, gate, up, act="silu") if gate.type is up.type else None


@rule(P.linear("x", "w"))
def narrow(x: Value, w: Value) -> Op | None:
    if "f16" in (x.type.dtype, w.type.dtype):
        return None
    product = Linear(Cast(x, dtype="f16"), Cast(w, dtype="f16"))
    return Cast(product, dtype=x.type.dtype)


@rule(P.silu("x"))
def relu(x: Value) -> Op:
    return Relu(x)


@rule(TWICE)
def wrong_type(x: Value) -> Op:
    return Cast(x, dtype="f16")


@rule(P.rms_norm("x", "w").capture("norm"))
def another_eps(x: Value, w: Value, norm: RmsNorm) -> Op | None:
    return None if norm.eps == 2e-6 else RmsNorm(x, w, eps=2e-6, offset=norm.offset)


@rule(TWICE)
def nothing(x: Value) -> Value:
    return x


@rule(TWICE)
def absolute(x: Value) -> Op | None:
    return None if x.type.global_type.partial else Abs(x)


@rule(TWICE)
def odd_absolute(x: Value) -> Value | Op:
    last = x.type.shape[-1] if x.type.ndim else 1
    is_odd = isinstance(last, int) and last % 2 and last > 1
    return Abs(x) if is_odd and not x.type.global_type.partial else x


@rule(P.silu("x"))
def crash(x: Value) -> Op:
    return Silu(x.type.shape[7])  # pyright: ignore[reportArgumentType]


class Rules(Pass):
    """Applies one rule."""

    rules = (nothing,)

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, self.rules))


@register("drops-a-bias")
class DropsABias(Rules):
    rules = (without_bias,)


@register("computes-in-f16")
class ComputesInF16(Rules):
    rules = (narrow,)


@register("confuses-activations")
class ConfusesActivations(Rules):
    rules = (relu,)


@register("changes-the-type")
class ChangesTheType(Rules):
    rules = (wrong_type,)


@register("writes-another-eps")
class WritesAnotherEps(Rules):
    rules = (another_eps,)


@register("fails-at-odd-sizes")
class FailsAtOddSizes(Rules):
    rules = (odd_absolute,)


@register("has-a-bug")
class HasABug(Rules):
    rules = (crash,)


@register("fails-on-3-ranks")
class FailsOn3Ranks(Pass):
    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, [absolute if "tp=3" in str(module.mesh) else nothing]))


@register("swaps-each-time")
class SwapsEachTime(Pass):
    def run(self, module: Module, stats: Stats) -> None:
        for op in additions(module):
            if permit("swap", op):
                replace(op, Add(op.y, op.x))


@register("changes-others")
class ChangesOthers(Pass):
    """Behind a rewrite it changes an addition elsewhere."""

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, [nothing]))
        for op in additions(module)[: stats.rules["nothing"].hits]:
            replace(op, Maximum(Add(op.y, op.x), Add(op.x, op.y)))


@register("does-not-ask")
class DoesNotAsk(Pass):
    """It separates biases without `permit`."""

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, [nothing]))
        for op in list(module.main):
            if isinstance(op, Linear) and op.bias is not None:
                replace(op, Add(Linear(op.x, op.weight), op.bias))


@register("remembers")
class Remembers(Pass):
    """Every other run does nothing."""

    seen = [0]  # noqa: RUF012

    def run(self, module: Module, stats: Stats) -> None:
        self.seen[0] += 1
        if self.seen[0] % 2:
            stats.update(apply_rules(module, [nothing]))


def additions(module: Module) -> list[Add]:
    """Those of two different values of one type."""
    adds = [op for op in module.main if isinstance(op, Add)]
    return [op for op in adds if op.x.type is op.y.type and op.x is not op.y]
