"""Small edits that passes make in place."""

from __future__ import annotations

from typing import Any, TypeVar

from irc.core import Op, Value

Made = TypeVar("Made", bound=Op)


def insert_before(new: Made, op: Op) -> Made:
    """Put a new operation in front of another one, as written at its place."""
    assert op.parent is not None
    new.loc = op.loc
    op.parent.insert(new, op)
    return new


def only_user(value: Value) -> Op | None:
    """The operation that uses a value once, where nothing else uses it; else None."""
    return next(iter(value.users)) if sum(value.users.values()) == 1 else None


def used_once(value: Value) -> bool:
    """Whether a value is the operand of one operation, in one place."""
    return only_user(value) is not None


def change(op: Op, **attributes: Any) -> None:
    """Give an operation other attributes before its results get their types anew."""
    for name, value in attributes.items():
        setattr(op, name, value)
