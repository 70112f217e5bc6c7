"""A Python file of the user's own that registers passes and operations (`--load my_pass.py`)."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

from ..declare import REGISTRY
from ..errors import Error
from .base import PASSES


def load_file(path: str | Path) -> list[str]:
    """Run a Python file that registers passes or operations, and give their names.

    What it prints goes to standard error. An Error says at which line the file fails; then it
    registers nothing.
    """
    file = Path(path)
    if not file.is_file():
        raise Error(f"there is no file {str(file)!r} to load")
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    name = f"irc_loaded_{digest}"
    if name in sys.modules:
        known = [*PASSES.items(), *REGISTRY.items()]
        return [key for key, cls in known if cls.__module__ == name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Error(f"{str(file)!r} is no Python file; its name must end in .py")
    before = {*PASSES, *REGISTRY}
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        for added in _added(before):
            PASSES.pop(added, None)
            REGISTRY.pop(added, None)
        raise Error(f"{_line_in(file, error)}: {_kind(error)}{_message(error)}") from error
    found = _added(before)
    if not found:
        del sys.modules[name]
        raise Error(
            f'{file.name} registers no pass and no operation; put @register("name") or '
            '@operation("name") above a class'
        )
    return found


def _added(before: set[str]) -> list[str]:
    return [name for name in (*PASSES, *REGISTRY) if name not in before]


def _line_in(file: Path, error: BaseException) -> str:
    """`my_pass.py:12`, the last line of the file that the error passed through."""
    if isinstance(error, SyntaxError):
        return f"{file.name}:{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"{file.name}:{lines[-1]}" if lines else file.name


def _kind(error: BaseException) -> str:
    return "" if isinstance(error, Error) else f"{type(error).__name__}: "


def _message(error: BaseException) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error)
