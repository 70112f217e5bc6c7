"""Extensions by installed packages through entry points."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import Error

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def installed(group: str) -> list[EntryPoint]:
    """The entries of installed packages in an entry-point group; nothing is loaded."""
    return [entry for entry in _installed(tuple(sys.path)) if entry.group == group]


@cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """All entries of irc's groups. Finding them reads a file of every package on the path."""
    from importlib.metadata import entry_points  # takes long to import

    installed = entry_points()
    return tuple(
        e
        for group in installed.groups
        if group.startswith("irc.")
        for e in installed.select(group=group)
    )


def load_installed(group: str) -> None:
    """Import the entries of installed packages in an entry-point group, once each.

    Importing registers it.
    """
    for entry in installed(group):
        if entry.module in sys.modules:
            continue
        load_entry(entry, group)


def load_entry(entry: EntryPoint, group: str) -> Any:
    """The object of an entry; an Error names the package where it does not load."""
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist is not None else "?"
        kind = "" if isinstance(error, Error) else f"{type(error).__name__}: "
        raise Error(
            f"{entry.value!r}, which the installed package {package} offers as {group}, "
            f"does not load: {kind}{error}"
        ) from error
