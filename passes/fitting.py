"""What rules share: a replacement only where it has the type of what it replaces."""

from __future__ import annotations

from typing import TypeVar

from irc.core import Op, Value

Replacement = TypeVar("Replacement", bound=Value | Op)


def fitting(new: Replacement, root: Op) -> Replacement | None:
    """`new` if it has the type of the only result of `root`, else None.

    The types differ where the root broadcast its operand or where sharding differs.
    """
    value = new if isinstance(new, Value) else new.result
    return new if value.type is root.result.type else None


def whole(*values: Value) -> bool:
    """Whether no value is split or a pending sum.

    Two operations in a row may carry a split that their composition cannot express.
    """
    return not any(value.type.sharded for value in values)
