"""A Python file of the user's own that registers passes and operations (`--load my_pass.py`)."""

from __future__ import annotations

from pathlib import Path

from ..user_files import run

_KINDS = ("pass", "operation", "plugin")
_NOTHING = (
    'registers no pass and no operation; put @register("name") or @operation("name") above a class'
)


def load_file(path: str | Path) -> list[str]:
    """Run a Python file that registers passes, operations or plugins, and give their names.

    It is run once per process, and what it prints goes to standard error. An Error says at which
    line the file fails; then it registers nothing.
    """
    found = run(path, _KINDS, _NOTHING).registered
    keys = [key for kind in _KINDS for key in found.get(kind, ())]
    return [key if isinstance(key, str) else key[-1] for key in keys]
