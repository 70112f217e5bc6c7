"""The communicators of this process, by the group that a plugin names and the rank that calls.

One engine serves all ranks, so a plugin's fields cannot say which rank it is on. A process that is
one rank registers one communicator per group; where ranks are threads of one process, each thread
says which rank it is with `act_as`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from irc.errors import Error


class Communicator(Protocol):
    """One rank's side of a group, as plugins use it; `irc.backends.cuda.group.Group` is one."""

    rank: int
    """The position in the group."""

    ranks: int
    """How many ranks the group has."""

    def bind(
        self, operation: str, dtype: str, elements: int, reduce_op: str = "none", root: int = -1
    ) -> Any:
        """What enqueues a collective of so many elements: launch(source, target, stream)."""
        ...

    def bind_add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> Any:
        """What enqueues sum += residual; normed = rms_norm(sum): see Group."""
        ...


class _Registry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.found: dict[tuple[str, int], Communicator] = {}
        self.generation = 0


_REGISTRY = _Registry()


class _Here(threading.local):
    rank: int | None = None


_HERE = _Here()


def register(group: str, rank: int, communicator: Communicator) -> None:
    """Make known the communicator of a rank (its number in the run) in the group of that name."""
    with _REGISTRY.lock:
        if (group, rank) in _REGISTRY.found:
            raise Error(f"rank {rank} has a communicator for the group {group!r} already")
        _REGISTRY.found[group, rank] = communicator
        _REGISTRY.generation += 1


def find(group: str, rank: int) -> Communicator:
    """The communicator of a rank in a group; an Error names those that there are."""
    found = _REGISTRY.found.get((group, rank))
    if found is None:
        known = ", ".join(f"{name} of rank {r}" for name, r in sorted(_REGISTRY.found)) or "none"
        raise Error(
            f"no communicator for the group {group!r} on rank {rank}; this process has {known}. "
            "Register one before the engine runs"
        )
    return found


def here(group: str) -> Communicator:
    """The communicator of a group for the rank that calls."""
    rank = _HERE.rank
    if rank is None:
        ranks = [r for name, r in _REGISTRY.found if name == group]
        if len(ranks) > 1:
            raise Error(
                f"this process has several ranks of the group {group!r}; "
                "each thread says which it is with communicators.act_as(rank)"
            )
        rank = ranks[0] if ranks else -1
    return find(group, rank) if rank >= 0 else _none(group)


def _none(group: str) -> Communicator:
    known = ", ".join(sorted({name for name, _ in _REGISTRY.found})) or "none"
    raise Error(
        f"no communicator for the group {group!r} in this process, which has {known}. "
        "Register one before the engine runs"
    )


def generation() -> int:
    """A number that changes with the registry, for those who keep what they found."""
    return _REGISTRY.generation


@contextmanager
def act_as(rank: int) -> Iterator[None]:
    """Inside, this thread is that rank of the run."""
    before, _HERE.rank = _HERE.rank, rank
    try:
        yield
    finally:
        _HERE.rank = before


def clear() -> None:
    """Forget all communicators; closing them is up to who made them."""
    with _REGISTRY.lock:
        _REGISTRY.found.clear()
        _REGISTRY.generation += 1
