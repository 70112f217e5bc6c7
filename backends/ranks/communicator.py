"""The `Communicator` protocol: what a rank can do together with the other ranks of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

from irc.backends.ranks.collective_call import CollectiveCall
from irc.errors import Error

Array: TypeAlias = np.ndarray[Any, Any]


class PeerError(Error):
    """Another rank ended, stalls or makes another call; the message names it. The run is over."""


def difference(what: str, facts: Sequence[str]) -> str:
    """The message about ranks whose facts differ; empty where all are the same."""
    other = next((rank for rank, fact in enumerate(facts) if fact != facts[0]), None)
    if other is None:
        return ""
    return f"the ranks differ in {what}: rank 0 has {facts[0]}, rank {other} has {facts[other]}"


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

    def paused(self) -> AbstractContextManager[None]:
        """Inside, this rank waits for a person, and no other rank considers it stuck."""
        ...

    def close(self) -> None:
        """Release what is held; every rank calls it once, at the end of a successful run."""
        ...
