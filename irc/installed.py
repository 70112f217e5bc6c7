"""What other installed packages add to irc, by entry points: operations, passes."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from .errors import Error


def load_installed(group: str) -> None:
    """Import what installed packages offer in an entry-point group, once each.

    Importing registers it. An Error names the package where that fails.
    """
    for entry in entry_points(group=group):
        if entry.module in sys.modules:
            continue
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else "?"
            kind = "" if isinstance(error, Error) else f"{type(error).__name__}: "
            raise Error(
                f"{entry.value!r}, which the installed package {package} offers as {group}, "
                f"does not load: {kind}{error}"
            ) from error
