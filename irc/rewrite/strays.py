"""Operations that a rule built and did not return: they must not linger as users."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from ..core import Op, Value


def unplaced_users(captures: Iterable[Any]) -> list[Op]:
    """The operations that were built over a rule's captures and are in no function yet.

    An operation registers as a user when it is built, so the fresh ones are the last users.
    """
    found: list[Op] = []
    for captured in captures:
        if isinstance(captured, Value):
            for user in reversed(captured.users):
                if user.parent is not None:
                    break
                found.append(user)
        elif isinstance(captured, tuple):
            found += unplaced_users(cast("tuple[Value, ...]", captured))
    return found


def drop_strays(built: list[Op]) -> None:
    """Unlink those of the fresh operations that were never inserted."""
    for op in built:
        if op.parent is None:
            op.drop_operands()
