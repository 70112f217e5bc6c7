"""`canonicalize`: removes operations that do nothing and shortens chains of them."""

from __future__ import annotations

from irc.core import Module
from irc.pipeline import Pass, Stats, register
from irc.rewrite import apply_rules

from .arithmetic_rules import ARITHMETIC_RULES
from .shape_rules import SHAPE_RULES


@register("canonicalize")
class Canonicalize(Pass):
    """Removes what does nothing (x * 1, casts there and back, ...) and shortens chains.

    Every rule gives the very same numbers, bit by bit: NaN stays NaN and -0.0 stays -0.0, which
    is why x + 0.0 is left as it is (it turns -0.0 into 0.0) while x + -0.0 goes away.
    """

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, [*ARITHMETIC_RULES, *SHAPE_RULES]))
