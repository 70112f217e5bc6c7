"""Python files of the user's own, which register passes, operations or plugins.

A file is run once per process, whoever asks for it: `--load`, `--plugin`, or as a model script.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from .errors import Error

_PREFIX = "irc_loaded_"
_LOADED = "__irc_user_file__"  # in a module that was run here: its UserFile
_RUNNING = RLock()  # ranks that are threads load the same files


@dataclass(frozen=True)
class UserFile:
    """A file that was run. `registered` has the keys of what it registered, by kind."""

    path: Path
    module: ModuleType
    registered: Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class _Registry:
    entries: MutableMapping[Any, Any]
    homes: Callable[[Any], set[str]]


_REGISTRIES: dict[str, _Registry] = {}


def _home(entry: Any) -> set[str]:
    return {entry.__module__}


def watch(
    kind: str, entries: MutableMapping[Any, Any], homes: Callable[[Any], set[str]] = _home
) -> None:
    """Let user files register entries of this kind; `homes` names the modules that made one."""
    _REGISTRIES[kind] = _Registry(entries, homes)


def run(path: str | Path, kinds: tuple[str, ...], nothing: str) -> UserFile:
    """Run a file unless that was done, and tell what it registered.

    What it prints goes to standard error. An Error says at which line the file fails, or, with the
    words `nothing`, that it registers nothing of these kinds; then it registers nothing at all.
    """
    file = Path(path)
    with _RUNNING:
        known = loaded(file)
        found = known if known is not None else _run(file)
        if not any(found.registered.get(kind) for kind in kinds):
            if known is None:
                _forget(found.module.__name__)
            raise Error(f"{file.name} {nothing}")
        return found


def loaded(path: str | Path) -> UserFile | None:
    """The file at a path, however it is written, if it was run."""
    return getattr(sys.modules.get(_name(Path(path))), _LOADED, None)


def files() -> list[UserFile]:
    """All files that were run, in order."""
    named = [module for name, module in sys.modules.items() if name.startswith(_PREFIX)]
    found = [getattr(module, _LOADED, None) for module in named]
    return [file for file in found if file is not None]


def _name(file: Path) -> str:
    return _PREFIX + hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]


def _run(file: Path) -> UserFile:
    if not file.is_file():
        raise Error(f"there is no file {str(file)!r} to load")
    name = _name(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Error(f"{str(file)!r} is no Python file; its name must end in .py")
    before = {kind: {*registry.entries} for kind, registry in _REGISTRIES.items()}
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        _forget(name)
        raise Error(f"{_place(file, error)}: {_what(error)}") from error
    registered = {
        kind: tuple(
            key
            for key, entry in registry.entries.items()
            if key not in before.get(kind, ()) and _foreign(registry.homes(entry))
        )
        for kind, registry in _REGISTRIES.items()
    }
    found = UserFile(file.resolve(), module, registered)
    setattr(module, _LOADED, found)
    return found


def _foreign(homes: set[str]) -> bool:
    """Whether modules besides irc's own made an entry: a file may be the first to import these."""
    return any(home != "irc" and not home.startswith("irc.") for home in homes)


def _forget(name: str) -> None:
    """Take back what a file itself registered. Modules that it imported stay, and so do theirs."""
    sys.modules.pop(name, None)
    for registry in _REGISTRIES.values():
        for key in [k for k, entry in registry.entries.items() if name in registry.homes(entry)]:
            del registry.entries[key]


def _place(file: Path, error: BaseException) -> str:
    """`my_pass.py:12`, the last line of the file that the error passed through."""
    if isinstance(error, SyntaxError) and _same(error.filename, file):
        return f"{file.name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if _same(frame.filename, file)]
    return f"{file.name}:{lines[-1]}" if lines else file.name


def _same(name: str | None, file: Path) -> bool:
    return name is not None and Path(name).absolute() == file.absolute()


def _what(error: BaseException) -> str:
    if isinstance(error, Error):
        return error.message
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
