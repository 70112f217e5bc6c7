"""Which split every name of a sharding rule gets at an operation whose operands disagree."""

from __future__ import annotations

from irc.core import Op, Value, Weight
from irc.sharding import Rule, Words
from irc.types import Axes

_VIEWS = frozenset(["transpose", "reshape", "squeeze", "unsqueeze", "cast"])


def chosen_axes(op: Op, rule: Rule, words: list[Words], placed: set[Value]) -> dict[str, Axes]:
    """The axes of every name; names that must be whole, and those that lose a conflict, have none.

    Of two different splits of one name the first operand's counts. One axis cannot split two
    names: what the plan split keeps it, else the name that comes first; a position comes last.
    """
    offers: dict[str, Axes] = {}
    planned: set[str] = set()
    for value, names in zip(op.operands, words, strict=True):
        for axes, name in zip(value.type.axes, names, strict=True):
            if not axes or name == "1" or name in rule.whole:
                continue
            offers.setdefault(name, axes)
            if _is_planned(value, placed):
                planned.add(name)
    pending = {a for value in op.operands for a in value.type.partial}
    chosen: dict[str, Axes] = {}
    taken: set[str] = set(pending)
    for name in sorted(offers, key=lambda n: (n not in planned, n in rule.positions)):
        axes = offers[name]
        if taken & set(axes):
            continue
        chosen[name] = axes
        taken |= set(axes)
    return chosen


def _is_planned(value: Value, placed: set[Value]) -> bool:
    """Whether a value is a weight that the plan split, as it is or in another order."""
    while not isinstance(value, Weight):
        op = value.producer
        if op is None or op.opname not in _VIEWS:
            return False
        value = op.operands[0]
    return value in placed
