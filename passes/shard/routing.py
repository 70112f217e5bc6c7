"""Gives sharded tokens separate expert slots per rank, where that does not change results.

It would with a capacity, because other tokens would exceed it, and where an operation depends on
the slot numbers themselves.
"""

from __future__ import annotations

from irc.ir.core import Module, Op, Value
from irc.ir.dims import exact_divide
from irc.ir.sharding import named_dims, operand_words, parse_rule
from irc.ops import MoeCombine, MoeDispatch, MoeSlots
from irc.ops.moe import Routed
from irc.pipeline import Stats

from ..shared.edit import change

_PLACES = 1  # the dimension of a buffer [experts, places, width]


def queue_apart(slots: MoeSlots, module: Module, stats: Stats) -> None:
    """Give moe operations as many parts as the tokens have shards."""
    axes = slots.chosen.type.axes[0]
    group_size = module.mesh.group_size(axes)
    if group_size == 1 or slots.parts != 1:
        return
    over = ".".join(axes)
    if slots.capacity != 0:
        stats.explain(
            f"moe_slots has a capacity, which counts the tokens of all ranks of {over}: they are "
            "gathered"
        )
        return
    routed = _users(slots)
    if routed is None or exact_divide(slots.chosen.type.shape[0], group_size) is None:
        return
    for op in (slots, *routed):
        change(op, parts=group_size)
    stats.explain(f"the tokens of every rank of {over} have expert slots of their own")


def _users(slots: MoeSlots) -> list[Routed] | None:
    """The users of the slots, if they only lead to a sum over experts."""
    found: list[Routed] = []
    for op in slots.result.users:
        if not isinstance(op, (MoeDispatch, MoeCombine)) or op.slots is not slots.result:
            return None
        if op.chosen is not slots.chosen or op.parts != 1:
            return None
        if isinstance(op, MoeDispatch) and (op.capacity != 0 or not _combined(op, slots)):
            return None
        found.append(op)
    return found


def _combined(dispatch: MoeDispatch, slots: MoeSlots) -> bool:
    """Whether every place of a buffer is treated separately until places are added up."""
    inside = [dispatch.result]
    op = dispatch.next
    while op is not None:
        if isinstance(op, MoeCombine) and op.buffer in inside:
            if op.slots is not slots.result:
                return False
        elif any(value in inside for value in op.operands):
            if not _by_place(op, inside):
                return False
            inside += op.results
        op = op.next
    return True


def _by_place(op: Op, inside: list[Value]) -> bool:
    """Whether an operation keeps the places of its operands in `inside` apart."""
    text = op.sharding_rule()
    if text is None:
        return False
    rule = parse_rule(text)
    names: set[str] = set()
    for value, (_, words) in zip(op.operands, operand_words(op, rule), strict=True):
        if value in inside:
            names |= {words[_PLACES]} if value.type.ndim == 3 else {"!"}
    if len(names) != 1 or names & (rule.replicated | rule.positions | {"1", "!"}):
        return False
    for value, (_, words) in zip(op.operands, operand_words(op, rule), strict=True):
        sized = [w for w, n in zip(words, value.type.shape, strict=True) if w in names and n != 1]
        if sized and value not in inside:
            return False
    results = rule.results * len(op.results) if len(rule.results) == 1 else rule.results
    return all(
        result.type.ndim == 3 and named_dims(words, 3)[_PLACES] in names
        for words, result in zip(results, op.results, strict=True)
    )
