"""A pass `planted` that runs another pass and damages what one rewrite of it made."""

from __future__ import annotations

from irc.ir.core import Module, Op, Value, replacements
from irc.ops import Add, Full, Mul
from irc.pipeline import Pass, Pipeline, Stats, parse_pipeline, register, run_pipeline
from irc.rewrite import Watch, watching


def plant() -> None:
    """Register the pass; for tests with restored registries."""

    @register("planted")
    class Planted(Pass):
        inner: str
        at: int  # the number of the rewrite

        def run(self, module: Module, stats: Stats) -> None:
            watch, log = Watch(collect=True), list[tuple[Value, Value]]()
            token = replacements.set(log)
            with watching(watch):
                parse_pipeline(self.inner).passes[0].run(module, stats)
            replacements.reset(token)
            if watch.made >= self.at:
                damage(watch.rewrites[self.at - 1].root, log)

    assert Planted.name == "planted"


def damage(root: Op, log: list[tuple[Value, Value]]) -> None:
    """Half as much again, and a half, in place of what took the place of an operation."""
    value = root.results[0] if root.results else root.operands[0]
    while value.producer is not None and value.producer.parent is None:
        value = next(new for old, new in log if old is value)
    half = [Full(value=number, dtype=value.type.dtype) for number in (1.5, 0.5)]
    product = Mul(value, half[0].result)
    total = Add(product.result, half[1].result)
    users = [user for user in value.users if user is not product]
    function = users[0].parent
    assert function is not None
    first = next(op for op in function if op in users)
    for op in (*half, product, total):
        op.loc = root.loc
        function.insert(op, first)
    for user in users:
        user.set_operands(tuple(total.result if v is value else v for v in user.operands))


def rewrites(module: Module, pipeline: Pipeline, inner: str) -> list[tuple[str, str]]:
    """(What, where) of every rewrite of a pass in a pipeline without any fault."""
    seen: list[tuple[str, str]] = []
    for pass_ in pipeline:
        watch = Watch(collect=True)
        with watching(watch):
            run_pipeline(module, [pass_])
        seen += [(r.rule, r.where) for r in watch.rewrites] if str(pass_) == inner else []
    return seen
