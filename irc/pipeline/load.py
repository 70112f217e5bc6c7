"""`load_file`: runs a Python file of the user that registers passes, operations or models."""

from __future__ import annotations

from pathlib import Path

from ..extensions.user_files import run

_KINDS = ("pass", "operation", "plugin", "model")
_NOTHING = (
    'registers no pass and no operation; put @register("name") or @operation("name") above a class'
)


def load_file(path: str | Path) -> list[str]:
    """Run a Python file of the user once per process: passes, operations, plugins, model families.

    Returns their names. What the file prints goes to standard error. An Error names the line at
    which the file fails; then it registers nothing.
    """
    found = run(path, _KINDS, _NOTHING).registered
    keys = [key for kind in _KINDS for key in found.get(kind, ())]
    return [key if isinstance(key, str) else key[-1] for key in keys]
