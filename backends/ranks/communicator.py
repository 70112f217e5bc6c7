"""What a rank does together with the other ranks of its run: the `Communicator` protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from irc.errors import Error

Array: TypeAlias = np.ndarray[Any, Any]
_DIVIDING = ("reduce_scatter", "all_to_all", "scatter")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective along dimension 0, as a `DistCollective` node of a model states it.

    `operation`: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather or
    scatter. `reduce_op`: sum, max, min, prod or none. `group`: the participating ranks, in the
    order of their shards. `root`: a position in the group. `place` names the node and the line of
    the user's script in error messages.
    """

    operation: str
    reduce_op: str
    group: tuple[int, ...]
    root: int = 0
    place: str = ""

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one rank's result from that of its operand; an Error where it cannot be
        divided into equal shards."""
        group_size = len(self.group)
        if self.operation in _DIVIDING and shape[0] % group_size:
            raise Error(
                f"{self.operation} divides dimension 0 of {list(shape)} into {group_size} equal "
                f"shards in {self.place or 'a call'}; pad it"
            )
        if self.operation in ("all_gather", "gather"):
            return (shape[0] * group_size, *shape[1:])
        if self.operation in ("reduce_scatter", "scatter"):
            return (shape[0] // group_size, *shape[1:])
        return shape

    def description(self, operand: Array) -> str:
        """The call on such an operand, in words: equal on all ranks that make the same call."""
        shape = ", ".join(map(str, operand.shape))
        kind = self.operation
        kind += "" if self.reduce_op == "none" else f" ({self.reduce_op})"
        root = f" from {self.root}" if self.root > 0 else ""
        return f"{kind}{root} of {operand.dtype}[{shape}] in {self.place or 'a model'}"


class PeerError(Error):
    """Another rank ended, stalls or makes another call; the message names it. The run is over."""


def difference(what: str, facts: Sequence[str]) -> str:
    """The message about ranks whose facts differ; empty where all are the same."""
    other = next((rank for rank, fact in enumerate(facts) if fact != facts[0]), None)
    if other is None:
        return ""
    return f"the ranks differ in {what}: rank 0 has {facts[0]}, rank {other} has {facts[other]}"


def disagreement(calls: Mapping[int, str]) -> str:
    """The message about ranks that make different calls, of which it names two; empty where all
    calls, by rank, are the same."""
    (rank, call), *others = sorted(calls.items())
    other = next((other for other in others if other[1] != call), None)
    if other is None:
        return ""
    return (
        f"the ranks make different calls: rank {rank} is at {call}, rank {other[0]} at {other[1]}; "
        "all need the same artifact and the same inputs"
    )


class Communicator(Protocol):
    """One rank's view of its run. All ranks make the same calls in the same order.

    Every method but `close` raises a PeerError, on every rank and within ten
    seconds, once a rank has failed or makes another call. `rank` is this rank, of `ranks` in all.
    """

    rank: int
    ranks: int

    @property
    def local_rank(self) -> int:
        """The position of this rank among those of its host: the number of its GPU."""
        ...

    @property
    def local_ranks(self) -> int:
        """The number of ranks on this host, this one included."""
        ...

    def collective(self, call: CollectiveCall, operand: Array, result: Array) -> None:
        """Take part in a collective: reads `operand`, writes `result`, both contiguous."""
        ...

    def send(self, to: int, arrays: Mapping[str, Array]) -> None:
        """Send copies of named arrays to another rank; returns before they are received."""
        ...

    def receive(self, source: int) -> dict[str, Array]:
        """The arrays of the next `send` of `source` to this rank."""
        ...

    def broadcast(self, data: bytes, root: int = 0, group: Sequence[int] = ()) -> bytes:
        """The `data` of rank `root`, on every rank of `group` (default: all ranks)."""
        ...

    def agree(self, what: str, fact: str) -> None:
        """Compare a fact, such as a checksum, over all ranks: a PeerError where they differ."""
        ...

    def check(self) -> None:
        """Health check: a PeerError where the run has failed. Any thread may call it, often."""
        ...

    def report(self, progress: Callable[[], int]) -> None:
        """Tell all ranks a number that changes while the device of this rank gets on with work."""
        ...

    def progress(self) -> tuple[int, ...]:
        """The latest numbers that all ranks have told. Any thread may call it, often."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Inside, this rank waits for a person, and no other rank considers it stuck."""
        ...

    def close(self) -> None:
        """Release what is held; every rank calls it once, at the end of a successful run."""
        ...
