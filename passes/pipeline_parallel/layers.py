"""The layers of a function, from the module scopes of its operations, and values between them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from irc.ir.core import Function, Op, Value


@dataclass(frozen=True)
class Groups:
    """Consecutive parts of a function between which it can be cut.

    `names` holds the scopes of the layers (`model.layers.0`, ...); it is empty where operations
    have no such scopes, and every operation is a group. `place` maps operations, in program order,
    to the number of their group.
    """

    names: tuple[str, ...]
    place: dict[Op, int]

    @property
    def count(self) -> int:
        """The number of groups."""
        return len(self.names) or len(self.place)

    @property
    def kind(self) -> str:
        """The kind of the groups, for messages."""
        return "layers" if self.names else "operations"

    def name(self, group: int) -> str:
        """`model.layers.3`, or `operation 3` where there are no layers."""
        return self.names[group] if self.names else f"operation {group}"


def groups_of(function: Function, left_out: Container[Op]) -> Groups:
    """The layers of a function in the order in which they begin, with every operation in one.

    A layer is an entry of a list of modules: a scope up to its first integer, as
    `model.layers.3` of `model.layers.3.mlp`; one at the very front is passed over where an integer
    follows, since there it counts the parts of a sequence of modules. What has no layer of its own
    is put where its last operand is made, or, before all layers, where it is first used. The
    operations `left_out` are not put anywhere.
    """
    every = [op for op in function if op.opname != "return"]
    ops = [op for op in every if op not in left_out]
    names = _layer_names(every, 1) or _layer_names(every, 0)
    if not names:
        return Groups((), {op: i for i, op in enumerate(ops)})
    order = {name: i for i, name in enumerate(dict.fromkeys(names.values()))}
    own = {op: order[name] for op, name in names.items()}
    return Groups(tuple(order), _placed(ops, own))


def _layer_names(ops: list[Op], first: int) -> dict[Op, str]:
    """The layer of every operation that has one; integers before component `first` do not count."""
    layer_of: dict[Op, str] = {}
    for op in ops:
        parts = op.loc.scope.split(".") if op.loc is not None else []
        at = next((i for i in range(first, len(parts)) if parts[i].isdecimal()), None)
        if at is not None:
            layer_of[op] = ".".join(parts[: at + 1])
    return layer_of


def _placed(ops: list[Op], own: dict[Op, int]) -> dict[Op, int]:
    """A group for every operation: its own or a later one, never before that of an operand."""
    place: dict[Op, int] = {}
    for op in ops:
        makers = [place[maker] for v in op.operands if (maker := v.producer) in place]
        if op in own:
            place[op] = max([own[op], *makers])
        elif makers:
            place[op] = max(makers)
    for op in reversed(ops):
        if op not in place:
            users = [place[user] for v in op.results for user in v.users if user in place]
            place[op] = min(users, default=0)
    return {op: place[op] for op in ops}


def alive_between(place: Mapping[Op, int], groups: int) -> list[list[Value]]:
    """Per group the values that were made in an earlier one and are used in it or later.

    `place` maps operations, in program order, to the number of their group; no value is used in
    an earlier group than it is made in. Operations that are not in it neither make nor use.
    """
    alive: list[list[Value]] = [[] for _ in range(groups)]
    for op, first in place.items():
        for value in op.results:
            last = max((place.get(user, first) for user in value.users), default=first)
            for group in range(first + 1, last + 1):
                alive[group].append(value)
    return alive
