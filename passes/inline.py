"""`inline`: replaces calls by the body of the function."""

from __future__ import annotations

from irc.ir.core import Function, Module, Op, Value
from irc.pipeline import Pass, Stats, register
from irc.rewrite import permit, replace

from .shared.edit import copy_before


@register("inline")
class Inline(Pass):
    """Replaces every call by the body of the function, and removes functions called nowhere else.

    Operations keep the locations they have in the body. A function is defined before its calls,
    so the bodies that are copied hold no calls any more. The main function always stays, and so do
    the calls of pipeline stages, which run on other ranks.
    """

    view = "global"

    def run(self, module: Module, stats: Stats) -> None:
        called: dict[str, None] = {}
        for function in module.functions.values():
            for op in function:
                if _replaceable(op) and permit("inline", op):
                    called[op.attributes["callee"].name] = None
                    _inline(op)
                    stats.count("calls")
        main = module.main
        left = {op.attributes["callee"].name for op in module.ops() if op.opname == "call"}
        for name in [n for n in called if n not in left and n != main.name]:
            for op in reversed(module.functions.pop(name)):
                op.erase()  # its uses of weights
            stats.count("functions")


def _replaceable(op: Op) -> bool:
    return op.opname == "call" and op.attributes["stage"] < 0


def _inline(call: Op) -> None:
    callee: Function = call.attributes["callee"]
    function = call.parent
    assert function is not None
    copies: dict[Value, Value] = dict(zip(callee.args, call.operands, strict=True))
    for op in callee:
        if op.opname == "return":
            break
        copy_before(op, function, call, copies)
    values = tuple(copies.get(value, value) for value in callee.returned)
    for old, new in zip(call.results, values, strict=True):
        if old.name is not None and new.producer is not None and new not in call.operands:
            new.name = old.name
    replace(call, values)
