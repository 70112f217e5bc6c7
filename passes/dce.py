"""`dce`: removes unused operations, weights and files."""

from __future__ import annotations

from irc.ir.core import Function, Module
from irc.ops import Call
from irc.pipeline import Pass, Stats, register
from irc.rewrite import permit


@register("dce")
class Dce(Pass):
    """Removes pure operations without users, then weights and files that nothing refers to.

    Arguments and functions stay, since callers refer to them, and so do the calls of pipeline
    stages, since their ranks run them.
    """

    def run(self, module: Module, stats: Stats) -> None:
        effects: set[Function] = set()
        for function in module.functions.values():
            if _sweep(function, effects, stats):
                effects.add(function)
        for name in [name for name, weight in module.weights.items() if not weight.users]:
            del module.weights[name]
            stats.count("weights")
        used = {file for weight in module.weights.values() for file in weight.ref.files()}
        for name in [name for name in module.files if name not in used]:
            del module.files[name]
            stats.count("files")


def _sweep(function: Function, effects: set[Function], stats: Stats) -> bool:
    """Remove dead operations; whether any with an effect but `return` is left.

    `effects` are the functions defined before that have one, so a call of them has one too.
    """
    erased = False
    for op in reversed(function):
        pure = op.pure and not (isinstance(op, Call) and (op.callee in effects or op.stage >= 0))
        erased |= not pure and op.opname != "return"
        if not pure or any(result.users for result in op.results):
            continue
        if permit("dce", op):
            op.erase()
            stats.count("operations")
    return erased
