"""Passes from elsewhere: a file (`--load my_pass.py`) or the entry-point group `irc.passes`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from importlib.metadata import entry_points
from pathlib import Path

from ..errors import Error
from .base import PASSES

GROUP = "irc.passes"


def load_passes(path: str | Path) -> list[str]:
    """Run a Python file that registers passes, and give their names.

    An Error says at which line the file fails. A file that fails registers nothing.
    """
    file = Path(path)
    if not file.is_file():
        raise Error(f"there is no file {str(file)!r} to load passes from")
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    name = f"irc_loaded_{digest}"
    if name in sys.modules:
        return [p for p, cls in PASSES.items() if cls.__module__ == name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Error(f"{str(file)!r} is no Python file; its name must end in .py")
    before = list(PASSES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        for added in [p for p in PASSES if p not in before]:
            del PASSES[added]
        raise Error(f"{_line_in(file, error)}: {_kind(error)}{_message(error)}") from error
    added = [p for p in PASSES if p not in before]
    if not added:
        del sys.modules[name]
        raise Error(f'{file.name} registers no pass; put @register("name") above its class')
    return added


def _line_in(file: Path, error: Exception) -> str:
    """`my_pass.py:12`, the last line of the file that the error passed through."""
    if isinstance(error, SyntaxError):
        return f"{file.name}:{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"{file.name}:{lines[-1]}" if lines else file.name


def _kind(error: Exception) -> str:
    return "" if isinstance(error, Error) else f"{type(error).__name__}: "


def _message(error: Exception) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error)


def load_installed() -> None:
    """Import the passes that installed packages offer, once each."""
    for entry in entry_points(group=GROUP):
        module = entry.value.partition(":")[0]
        if module in sys.modules:
            continue
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else "?"
            raise Error(
                f"the passes {entry.value!r} of the installed package {package} do not load: "
                f"{_kind(error)}{error}"
            ) from error
