"""A Python file of the user's own that registers plugins (`--plugin my_plugin.py`)."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path

from irc.errors import Error

from .spec import SPECS


def load(paths: Iterable[str | Path]) -> list[str]:
    """Run Python files that register plugins, and give the plugins' names.

    A file is run once per process. What it prints goes to standard error. An Error says at which
    line a file fails; then that file registers nothing.
    """
    return [name for path in paths for name in _load_file(Path(path))]


def _load_file(file: Path) -> list[str]:
    if not file.is_file():
        raise Error(f"there is no file {str(file)!r} to load plugins from")
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    name = f"irc_plugin_{digest}"
    if name in sys.modules:
        return list(sys.modules[name].__dict__["__irc_plugins__"])
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Error(f"{str(file)!r} is no Python file; its name must end in .py")
    before = set(SPECS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        _forget(name, before)
        raise Error(f"{_line(file, error)}: {_what(error)}") from error
    found = [key[1] for key in SPECS if key not in before]
    if not found:
        _forget(name, before)
        raise Error(f"{file.name} registers no plugin; call register(PluginSpec(...)) in it")
    module.__dict__["__irc_plugins__"] = found
    return found


def _forget(name: str, before: set[tuple[str, str]]) -> None:
    sys.modules.pop(name, None)
    for key in [key for key in SPECS if key not in before]:
        del SPECS[key]


def _line(file: Path, error: BaseException) -> str:
    """`file:line` of the last frame, or of the mistake, that is in the file."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


def _what(error: BaseException) -> str:
    if isinstance(error, Error):
        return error.message
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
