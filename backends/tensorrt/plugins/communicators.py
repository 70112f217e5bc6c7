"""The communicators of this process, by the group that a plugin names and the calling rank.

One engine serves all ranks, so that a plugin's fields cannot name its rank. A process that is one
rank registers one communicator per group; where ranks are threads, each thread names its rank with
`act_as`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from irc.backends.cuda.group import Group
from irc.errors import Error

_LOCK = threading.Lock()
_FOUND: dict[tuple[str, int], Group] = {}
_CHANGES = [0]  # counts the changes of the registry


class _Thread(threading.local):
    rank: int | None = None


_THREAD = _Thread()


def register(group: str, rank: int, communicator: Group) -> None:
    """Add the communicator of a rank (its number in the run) in the group of that name."""
    with _LOCK:
        if (group, rank) in _FOUND:
            raise Error(f"rank {rank} has a communicator for the group {group!r} already")
        _FOUND[group, rank] = communicator
        _CHANGES[0] += 1


def find(group: str, rank: int) -> Group:
    """The communicator of a rank in a group; an Error lists those that exist."""
    found = _FOUND.get((group, rank))
    return found if found is not None else _missing(group, f"on rank {rank}")


def here(group: str) -> Group:
    """The communicator of a group for the calling thread's rank, or the process's only one."""
    if _THREAD.rank is not None:
        return find(group, _THREAD.rank)
    found = [each for (name, _), each in _FOUND.items() if name == group]
    if len(found) > 1:
        raise Error(
            f"this process has several ranks of the group {group!r}; each thread must name its "
            "rank with communicators.act_as(rank)"
        )
    return found[0] if found else _missing(group, "in this process")


def _missing(group: str, place: str) -> NoReturn:
    known = ", ".join(f"{name} of rank {r}" for name, r in sorted(_FOUND)) or "none"
    raise Error(
        f"no communicator for the group {group!r} {place}, found {known}; register one before the "
        "engine runs"
    )


def generation() -> int:
    """A number that changes with the registry, for callers that cache what they found."""
    return _CHANGES[0]


@contextmanager
def act_as(rank: int) -> Iterator[None]:
    """Within the context, this thread is that rank of the run."""
    before, _THREAD.rank = _THREAD.rank, rank
    try:
        yield
    finally:
        _THREAD.rank = before


def clear() -> None:
    """Remove all communicators, without closing them."""
    with _LOCK:
        _FOUND.clear()
        _CHANGES[0] += 1
