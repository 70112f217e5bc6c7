"""Which profile of an engine a run uses, and how small inputs are filled up to its least sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from irc.backends.base import Port
from irc.dims import Dim, DimLike, bind
from irc.errors import Error

Array: TypeAlias = np.ndarray[Any, Any]
Sizes: TypeAlias = Mapping[str, int]
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """The least and the largest shape of each input whose shape a run decides."""

    name: str
    least: Mapping[str, Shape]
    most: Mapping[str, Shape]

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Profile:
        """A profile from its entry in the manifest."""
        shapes: Mapping[str, Any] = facts["shapes"]
        least = {name: tuple(ranges[0]) for name, ranges in shapes.items()}
        return cls(facts["name"], least, {name: tuple(r[2]) for name, r in shapes.items()})

    def takes(self, ports: Mapping[str, Port], sizes: Sizes) -> bool:
        """Whether inputs of these sizes fit."""
        return not any(n < low or n > high for _, _, n, low, high in self._dims(ports, sizes))

    def _dims(
        self, ports: Mapping[str, Port], sizes: Sizes
    ) -> Iterator[tuple[str, DimLike, int, int, int]]:
        """Per dimension of an input (input, dimension, its size, the least, the largest)."""
        for name in self.least:
            rows = zip(ports[name].shape, self.least[name], self.most[name], strict=True)
            for dim, low, high in rows:
                yield name, dim, size_of(dim, sizes), low, high

    def missing(self, ports: Mapping[str, Port], sizes: Sizes) -> dict[str, int]:
        """The symbols that are less than the profile takes, with the least that it does."""
        return {
            str(dim): low
            for _, dim, n, low, _ in self._dims(ports, sizes)
            if n < low and isinstance(dim, Dim) and list(dim.symbols()) == [str(dim)]
        }

    def refusal(self, ports: Mapping[str, Port], sizes: Sizes) -> str:
        """What does not fit."""
        for name, dim, n, low, high in self._dims(ports, sizes):
            if n < low or n > high:
                shown = f"{dim}={n}" if isinstance(dim, Dim) else str(n)
                return f"{self.name}: {name} has {shown} and must have {low} to {high}"
        return f"{self.name}: fits"


def size_of(dim: DimLike, sizes: Sizes) -> int:
    """A dimension as a number; an Error where a symbol has no size."""
    bound = bind(dim, sizes)
    if isinstance(bound, Dim):
        raise Error(f"{next(bound.symbols())} has no size: no input has this dimension")
    return bound


def filled_sizes(
    profiles: Sequence[Profile], ports: Mapping[str, Port], sizes: Sizes, may_grow: set[str]
) -> dict[str, int]:
    """`sizes` themselves where a profile takes them, else with some made larger so that one does.

    Only the symbols of `may_grow` become larger. An Error says what does not fit.
    """
    if any(profile.takes(ports, sizes) for profile in profiles) or not profiles:
        return dict(sizes)
    for profile in profiles:
        grown = profile.missing(ports, sizes)
        if set(grown) <= may_grow and profile.takes(ports, {**sizes, **grown}):
            return {**sizes, **grown}
    reasons = "; ".join(profile.refusal(ports, sizes) for profile in profiles)
    raise Error(
        f"no profile of the engine takes these inputs ({reasons}); give inputs of other sizes, or "
        "compile with wider --dims"
    )


def chosen(profiles: Sequence[Profile], ports: Mapping[str, Port], sizes: Sizes) -> int:
    """The number of the first profile that takes inputs of these sizes."""
    for number, profile in enumerate(profiles):
        if profile.takes(ports, sizes):
            return number
    return 0


def fill(array: Array, shape: Shape) -> Array:
    """`array` with zeros behind it up to a shape."""
    if array.shape == shape:
        return array
    return np.pad(array, [(0, n - m) for m, n in zip(array.shape, shape, strict=True)])


def trim(array: Array, shape: Shape) -> Array:
    """The first part of an array that has a shape."""
    return array if array.shape == shape else array[tuple(map(slice, shape))]
