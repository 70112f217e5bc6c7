"""How the ranks of one run talk to each other: what threads and processes implement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from irc.errors import Error

Array: TypeAlias = np.ndarray


@dataclass(frozen=True)
class Exchange:
    """One collective, as a `DistCollective` node of a model says it; always along dimension 0.

    `operation`: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather or
    scatter. `reduce_op`: sum, max, min, prod or none. `group`: the ranks that take part, in the
    order of their parts. `root`: a position in the group. `place` names the node, and with it the
    line of the user's script, in errors.
    """

    operation: str
    reduce_op: str
    group: tuple[int, ...]
    root: int = 0
    place: str = ""

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one rank's result from that of its operand."""
        ways = len(self.group)
        if self.operation in ("all_gather", "gather"):
            return (shape[0] * ways, *shape[1:])
        if self.operation in ("reduce_scatter", "scatter"):
            return (shape[0] // ways, *shape[1:])
        return shape

    def described(self, operand: Array) -> str:
        """What a rank does with such an operand, in words; ranks that say the same do the same."""
        shape = ", ".join(map(str, operand.shape))
        kind = self.operation
        kind += "" if self.reduce_op == "none" else f" ({self.reduce_op})"
        root = f" from {self.root}" if self.root > 0 else ""
        return f"{kind}{root} of {operand.dtype}[{shape}] in {self.place or 'a model'}"


class PeerError(Error):
    """Another rank died, stalls or disagrees; the message names it. The run cannot go on."""


class Communicator(Protocol):
    """One rank's side. Every rank calls the same methods in the same order.

    Every method raises a PeerError, on every rank and within the timeout, once any rank has failed
    or does something else. `neighbours`: how many of the `ranks` share this host, this one too.
    """

    rank: int
    ranks: int
    neighbours: int

    def exchange(self, what: Exchange, operand: Array, result: Array) -> None:
        """Take part in a collective: read `operand`, write `result`, both contiguous."""
        ...

    def send(self, to: int, arrays: Mapping[str, Array]) -> None:
        """Hand named arrays to another rank, which receives them by the same names."""
        ...

    def receive(self, source: int) -> dict[str, Array]:
        """The arrays that `source` sent."""
        ...

    def agree(self, what: str, fact: str) -> None:
        """A PeerError on every rank where the ranks do not all give the same `fact`."""
        ...

    def abort(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on."""
        ...

    def close(self) -> None:
        """Give up what is held; every rank calls it once, at the end."""
        ...
