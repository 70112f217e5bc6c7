"""Composite operations in simpler ones, as a list in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .core import Op, Value
from .declare import expanded_results, infers, placeholder


@dataclass(frozen=True)
class Expansion:
    """A composite operation in simpler ones, over stand-ins for its operands."""

    operands: tuple[Value, ...]
    ops: tuple[Op, ...]  # every one after those it uses
    results: tuple[Value, ...]


def expansion(op: Op) -> Expansion:
    """The expansion of a composite operation; `op` itself stays as it is."""
    types = [v.type if infers(op) else v.type.replicated for v in op.operands]
    stand_ins = tuple(
        Value(type, None, i, v.name)
        for i, (type, v) in enumerate(zip(types, op.operands, strict=True))
    )
    root = placeholder(op, stand_ins).expand()
    results = expanded_results(root)
    ops = in_order(results)
    for part in ops:
        part.loc = part.loc or op.loc
    return Expansion(stand_ins, tuple(ops), results)


def in_order(results: Iterable[Value]) -> list[Op]:
    """The operations behind `results`, every one after those it uses."""
    order: dict[Op, None] = {}
    stack = [value.producer for value in results][::-1]
    while stack:
        op = stack[-1]
        if op is None or op in order:
            stack.pop()
            continue
        waiting = [p for v in op.operands if (p := v.producer) is not None and p not in order]
        if waiting:
            stack += reversed(waiting)
        else:
            order[op] = None
    return list(order)
