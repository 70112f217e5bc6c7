"""`canonicalize`: removes operations that do nothing and shortens chains of them."""

from __future__ import annotations

from irc.ir.core import Module
from irc.pipeline import Pass, Stats, register
from irc.rewrite import Rule, apply_rules

from . import arithmetic_rules, shape_rules

RULES = [
    item
    for file in (arithmetic_rules, shape_rules)
    for item in vars(file).values()
    if isinstance(item, Rule)
]


@register("canonicalize")
class Canonicalize(Pass):
    """Removes operations without effect (x * 1, casts back and forth, ...) and shortens chains.

    Every rule gives the very same numbers, bit by bit: NaN stays NaN and -0.0 stays -0.0, which
    is why x + 0.0 is kept (it turns -0.0 into 0.0) while x + -0.0 is removed.
    """

    def run(self, module: Module, stats: Stats) -> None:
        stats.update(apply_rules(module, RULES))
