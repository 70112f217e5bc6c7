"""`cse`: merges equal operations."""

from __future__ import annotations

from typing import Any, cast

from irc.analysis.fused import is_repeatable
from irc.ir.core import Module, Op
from irc.pipeline import Pass, Stats, register

from .shared.edit import merge_equal


@register("cse")
class Cse(Pass):
    """Merges operations of the same kind with the same operands and attributes.

    The first in order stays. Calls, collectives and impure operations are kept.
    """

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            merge_equal(function, "cse", _key, stats)


def _key(op: Op) -> Any:
    if not is_repeatable(op):
        return None
    operands: Any = op.operands
    if op.commutative and len(operands) == 2:
        operands = frozenset(operands) if operands[0] is not operands[1] else operands
    attributes = tuple([_exact(getattr(op, name)) for name in op.attribute_types])
    return op.__class__, operands, op.present, attributes


def _exact(value: Any) -> Any:
    """A key that tells 0.0 from -0.0 and 1 from 1.0 and true."""
    if isinstance(value, tuple):
        return tuple([_exact(item) for item in cast("tuple[Any, ...]", value)])
    return value.__class__, repr(value) if isinstance(value, float) else value
