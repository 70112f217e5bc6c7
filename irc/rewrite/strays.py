"""Operations that a rule built and did not return: they must not linger as users."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from ..core import Op, Value


class Strays:
    """The fresh users of a rule's captures; `drop` unlinks those that were never inserted.

    An operation registers as a user when it is built, so the fresh ones are the last users. Made
    after the rule ran and before its result is inserted.
    """

    __slots__ = ("users",)

    def __init__(self, captures: tuple[Any, ...]) -> None:
        self.users: list[Op] = []
        self._add(captures)

    def _add(self, captures: Iterable[Any]) -> None:
        for captured in captures:
            if isinstance(captured, tuple):
                self._add(cast("tuple[Value, ...]", captured))
            elif isinstance(captured, Value):
                for user in reversed(captured.users):
                    if user.parent is not None:
                        break
                    self.users.append(user)

    def drop(self) -> None:
        """Unlink the operations that are still in no function."""
        for user in self.users:
            if user.parent is None:
                user.drop_operands()
