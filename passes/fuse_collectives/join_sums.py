"""Joins sums over ranks that are added to each other into one."""

from __future__ import annotations

from functools import reduce as fold

from irc.ir.core import Function, Value
from irc.ops import Add, AllReduce, ReduceScatter
from irc.pipeline import Stats
from irc.rewrite import erase_dead, permit

from ..shared.edit import insert_before, used_once


def join_sums(function: Function, name: str, stats: Stats) -> None:
    """Rewrite all_reduce(x) + r + all_reduce(y) as r + all_reduce(x + y); so with reduce_scatter.

    Blocks with parallel attention and feed-forward have such sums.
    """
    for root in list(function):
        if not isinstance(root, Add) or root.parent is None or _inside(root):
            continue
        terms = _terms(root.result)
        groups: dict[object, list[Value]] = {}
        for term in terms:
            key = _key(term)
            if key is not None:
                groups.setdefault(key, []).append(term)
        joined = [group for group in groups.values() if len(group) > 1]
        if joined and permit(name, root):
            _join(root, terms, joined)
            stats.count("joined", sum(len(group) - 1 for group in joined))


def _inside(op: Add) -> bool:
    """Whether an addition is a part of a larger one."""
    users = list(op.result.users)
    return (
        len(users) == 1
        and isinstance(users[0], Add)
        and users[0].result.type is op.result.type
        and used_once(op.result)
    )


def _terms(root: Value) -> list[Value]:
    """The terms of a sum, left to right, without those of sums that are used elsewhere."""
    addends: list[Value] = []
    waiting = [root]  # a list, since recursion would limit the number of terms
    while waiting:
        value = waiting.pop()
        op = value.producer
        apart = value is root or (used_once(value) and value.type is root.type)
        if isinstance(op, Add) and apart:
            waiting += reversed(op.operands)
        else:
            addends.append(value)
    return addends


def _key(term: Value) -> object:
    """The key that joinable sums over ranks share; None for other terms."""
    op = term.producer
    if not isinstance(op, (AllReduce, ReduceScatter)) or op.op != "sum" or not used_once(term):
        return None
    return op.opname, op.x.type, tuple(op.attributes.items())


def _join(root: Add, terms: list[Value], joined: list[list[Value]]) -> None:
    """Rebuild the addition: each group in place of its first member."""
    group_of = {term: group for group in joined for term in group}
    new: list[Value] = []
    for term in terms:
        group = group_of.get(term)
        if group is None:
            new.append(term)
        elif term is group[0]:
            new.append(_joined(root, group))
    total = fold(lambda x, y: insert_before(Add(x, y), root).result, new)
    total.name, root.result.name = root.result.name, None
    root.result.replace_by(total)
    erase_dead(root)


def _joined(root: Add, group: list[Value]) -> Value:
    first = group[0].producer
    assert first is not None
    parts = [op.operands[0] for op in (term.producer for term in group) if op is not None]
    partial = fold(lambda x, y: insert_before(Add(x, y), root).result, parts)
    complete = insert_before(first.rebuilt([partial]), root).result
    complete.name = group[0].name
    return complete
