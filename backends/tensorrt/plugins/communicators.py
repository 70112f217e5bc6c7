"""The communicators that plugins call, by the group that they name.

One engine serves all ranks, so that the fields of a plugin cannot name a rank: the thread that runs
an engine says which groups are its own.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from irc.backends.cuda.group import Group
from irc.errors import Error


class _Thread(threading.local):
    groups: Mapping[str, Group] = {}


_THREAD = _Thread()


@contextmanager
def use(groups: Mapping[str, Group]) -> Generator[None]:
    """Inside, plugins that this thread runs find these communicators."""
    before, _THREAD.groups = _THREAD.groups, groups
    try:
        yield
    finally:
        _THREAD.groups = before


def here(group: str) -> Group:
    """The communicator of a group in this thread; an Error lists those that exist."""
    found = _THREAD.groups.get(group)
    if found is None:
        known = ", ".join(sorted(_THREAD.groups)) or "none"
        raise Error(
            f"no communicator for the group {group!r} in this thread, found {known}; run the "
            "engine inside communicators.use"
        )
    return found
