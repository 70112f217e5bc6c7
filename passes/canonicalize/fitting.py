"""Checks of the types of replacements, which rules share."""

from __future__ import annotations

from typing import TypeVar

from irc.ir.core import Op, Value

Replacement = TypeVar("Replacement", bound=Value | Op)


def fitting(new: Replacement, root: Op) -> Replacement | None:
    """`new` if it has the type of the only result of `root`, else None.

    The types differ where the root broadcast its operand or where sharding differs.
    """
    value = new if isinstance(new, Value) else new.result
    return new if value.type is root.result.type else None


def unsharded(*values: Value) -> bool:
    """Whether no value is sharded or a partial sum.

    Two operations in a row may have axes that their composition cannot express.
    """
    return not any(value.type.sharded for value in values)
