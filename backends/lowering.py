"""Lowering tables: how a backend writes each operation, by operation class.

Importing an operation never imports a backend. Another package adds lowerings through the
entry-point group `irc.lowerings`: the name is the backend's, the object is called with its table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Generic, TypeVar

from irc.backends.base import Unsupported
from irc.extensions.entry_points import installed
from irc.ir.core import Module, Op, reached
from irc.ir.expansion import expansion

GROUP = "irc.lowerings"
STRUCTURE = ("return", "call")  # every backend walks these itself

Lower = TypeVar("Lower", bound=Callable[..., object])
Refusal = Callable[[Op], str | None]
Alone = Callable[[Op], bool]


class Lowering(Generic[Lower]):
    """The lowerings of one backend, which decides on their arguments.

    `parts` are modules that fill the table, imported when it is first read.
    """

    def __init__(self, backend: str, parts: Sequence[str] = ()) -> None:
        self.backend, self._parts = backend, parts
        self._table: dict[type[Op], Lower] = {}
        self._refusals: dict[type[Op], Refusal] = {}
        self._alone: dict[type[Op], Alone] = {}
        self._loaded = False

    def lower(
        self, *classes: type[Op], unless: Refusal | None = None, alone: Alone | None = None
    ) -> Callable[[Lower], Lower]:
        """Register a lowering. `unless` returns why it cannot lower an instance, or None; then the
        expansion is used, except where `alone` is true.
        """

        def register(function: Lower) -> Lower:
            for cls in classes:
                if cls in self._table:
                    raise ValueError(f"{self.backend} has two lowerings of {cls.opname}")
                self._table[cls] = function
                if unless is not None:
                    self._refusals[cls] = unless
                if alone is not None:
                    self._alone[cls] = alone
            return function

        return register

    def find(self, op: Op) -> Lower | None:
        """The lowering of this operation; None without one that supports it."""
        self._load()
        return self._table.get(type(op)) if self.reason(op) is None else None

    def entries(self) -> dict[type[Op], tuple[Lower, Refusal | None]]:
        """Per class its lowering, and the function that returns why it cannot lower an instance."""
        self._load()
        return {cls: (lower, self._refusals.get(cls)) for cls, lower in self._table.items()}

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class has a lowering."""
        self._load()
        return cls in self._table

    def reason(self, op: Op) -> str | None:
        """Why the lowering of its class cannot lower this operation, or None."""
        refuse = self._refusals.get(type(op))
        return refuse(op) if refuse is not None else None

    def unsupported(self, module: Module) -> list[Unsupported]:
        """Every operation without a lowering or a covered expansion, in order.

        Functions that the main function does not call are not written.
        """
        self._load()
        reasons: dict[object, str | None] = {}
        refused: list[Unsupported] = []
        easy = {*self._table} - {*self._refusals}
        for op in reached(module.main, set()):
            if type(op) in easy or op.opname in STRUCTURE:
                continue
            key = op.type_key()
            if key not in reasons:
                reasons[key] = self._missing(op)
            if (reason := reasons[key]) is not None:
                refused.append(Unsupported(op, reason))
        return refused

    def _missing(self, op: Op) -> str | None:
        """Why the operation cannot be lowered, or None."""
        reason = self.reason(op)
        if reason is None and type(op) in self._table:
            return None
        alone = self._alone.get(type(op))
        if not op.composite or (alone is not None and alone(op)):
            return reason or "has no lowering"
        for part in expansion(op).ops:
            inner = self._missing(part)
            if inner is not None:
                why = reason or "has no lowering"
                return f"{why}, and its expansion needs {part.opname}, which {inner}"
        return None

    def _load(self) -> None:
        """Its own lowerings and those of other packages, once."""
        if self._loaded:
            return
        self._loaded = True
        for part in self._parts:
            import_module(part)
        for entry in installed(GROUP):
            if entry.name == self.backend:
                entry.load()(self)
