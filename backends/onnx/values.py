"""What the values of a graph are called, and how lowerings return them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from irc.ir.core import Function, Value


@dataclass
class Place:
    """The names of a value: in its own shape, and flattened to a matrix of its last dimension."""

    shaped: str | None = None
    flat: str | None = None


@dataclass(frozen=True)
class Flat:
    """A lowering's result as a matrix [everything else, last dimension]."""

    name: str


@dataclass(frozen=True)
class Later:
    """A result that users may do without: `make` adds its nodes where one needs it after all."""

    make: Callable[[], str]


def printed_names(function: Function) -> dict[Value, str]:
    """The names that values have in the printed text, without the percent sign."""
    names: dict[Value, str] = {}
    counts: dict[str, int] = {}
    for value in (*function.args, *(r for op in function for r in op.results)):
        base = value.name or ""
        n = counts.get(base, 0)
        counts[base] = n + 1
        names[value] = (f"{base}.{n}" if n else base) if base else str(n)
    return names
