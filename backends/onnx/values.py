"""What the values of a graph are called, and how lowerings return them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
