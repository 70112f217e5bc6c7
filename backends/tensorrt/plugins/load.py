"""Python files of the user's own that register plugins (`--plugin my_plugin.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from irc.errors import Error
from irc.user_files import files, is_users, run

from .spec import SPECS, PluginSpec, homes, shown

_NOTHING = "registers no plugin; call register(PluginSpec(...)) in it"


def load(paths: Iterable[str | Path]) -> list[str]:
    """Run Python files that register plugins, and give the plugins' names.

    A file is run once per process. What it prints goes to standard error. An Error says at which
    line a file fails; then that file registers nothing.
    """
    found = [run(path, ("plugin",), _NOTHING) for path in paths]
    return [name for file in found for _, name in file.registered["plugin"]]


def files_of(names: Iterable[str]) -> list[str]:
    """The users' files that registered plugins, called as `versions` does.

    An Error where no file did: a process that builds an engine has none but files.
    """
    paths = {key: str(file.path) for file in files() for key in file.registered.get("plugin", ())}
    known = {shown(*key): key for key in SPECS}
    found: dict[str, None] = {}
    for name in names:
        key = known[name]
        if key in paths:
            found[paths[key]] = None
        elif is_users(homes(SPECS[key])):
            raise Error(
                f"no file registers the plugin {name}, and engines are built in another process; "
                "give --plugin with the file that calls register(PluginSpec(...))"
            )
    return list(found)


def users() -> list[PluginSpec]:
    """All plugins but those that irc brings."""
    return [spec for spec in SPECS.values() if is_users(homes(spec))]
