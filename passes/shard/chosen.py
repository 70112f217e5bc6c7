"""The axes that propagation gives every name of a sharding rule."""

from __future__ import annotations

from irc.ir.core import Op, Value, Weight
from irc.ir.sharding import Rule, Words
from irc.ir.types import Axes
from irc.ops import Dequantize


def chosen_axes(op: Op, rule: Rule, words: list[Words], placed: set[Value]) -> dict[str, Axes]:
    """The axes of every name; replicated names, and those that lose a conflict, have none.

    Of different axes of one name those of the first operand count. One axis cannot shard two names:
    a name that the plan shards keeps it, else the first name; positions come last.
    """
    offers: dict[str, Axes] = {}
    planned: set[str] = set()
    for value, names in zip(op.operands, words, strict=True):
        for axes, name in zip(value.type.axes, names, strict=True):
            if not axes or name == "1" or name in rule.replicated:
                continue
            offers.setdefault(name, axes)
            if _is_planned(value, placed):
                planned.add(name)
    partial = {a for value in op.operands for a in value.type.partial}
    chosen: dict[str, Axes] = {}
    taken: set[str] = set(partial)
    for name in sorted(offers, key=lambda n: (n not in planned, n in rule.positions)):
        axes = offers[name]
        if taken & set(axes):
            continue
        chosen[name] = axes
        taken |= set(axes)
    return chosen


def _is_planned(value: Value, placed: set[Value]) -> bool:
    """Whether a value is a weight that the plan shards, as it is, moved or dequantized."""
    while not isinstance(value, Weight):
        op = value.producer
        moved = op is not None and op.moves_data and len(op.operands) == 1
        if op is None or not (moved or isinstance(op, Dequantize)):
            return False
        value = op.operands[0]
    return value in placed
