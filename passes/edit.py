"""Small edits that passes make in place."""

from __future__ import annotations

from typing import Any, TypeVar

from irc.core import Op

Made = TypeVar("Made", bound=Op)


def insert_before(new: Made, op: Op) -> Made:
    """Put a new operation in front of another one, as written at its place."""
    assert op.parent is not None
    new.loc = op.loc
    op.parent.insert(new, op)
    return new


def change(op: Op, **attributes: Any) -> None:
    """Give an operation other attributes before its results get their types anew."""
    for name, value in attributes.items():
        setattr(op, name, value)
