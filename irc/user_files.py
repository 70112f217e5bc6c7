"""Python files of the user's own, which register passes, operations or plugins.

A file that is loaded (`--load`, `--plugin`) is run once per process, also where it is the model
script. A script that is not loaded is run whenever it is asked for; what it registers stays until
its file is run again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any

from .errors import Error

_PREFIX = "irc_loaded_"
_LOADED = "__irc_user_file__"  # in a module that was run here: its UserFile
_RUNNING = RLock()  # ranks that are threads load the same files
_SIBLINGS: dict[str, set[str]] = {}  # of a script by its module name: the modules that it brought


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


def homes_of(*made: Any) -> set[str]:
    """The modules that functions and classes are from, "" where one does not say."""
    whole = (each.func if isinstance(each, partial) else each for each in made)
    return {getattr(each, "__module__", None) or "" for each in whole}


def is_users(homes: set[str]) -> bool:
    """Whether something is a user's, being from these modules: not all of them are irc's own."""
    return any(home != "irc" and not home.startswith("irc.") for home in homes)


def watch(
    kind: str, entries: MutableMapping[Any, Any], homes: Callable[[Any], set[str]] = homes_of
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
                forget(found.module.__name__)
            raise Error(f"{file.name} {nothing}")
        return found


def loaded(path: str | Path) -> UserFile | None:
    """The file at a path, however it is written, if it was run."""
    return getattr(sys.modules.get(name_of(path)), _LOADED, None)


def files() -> list[UserFile]:
    """All files that were run, in order."""
    named = [module for name, module in sys.modules.items() if name.startswith(_PREFIX)]
    found = [getattr(module, _LOADED, None) for module in named]
    return [file for file in found if file is not None]


def name_of(path: str | Path) -> str:
    """The module name of the file at a path, however it is written, loaded or run as a script."""
    return _PREFIX + hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:12]


def forget(name: str) -> None:
    """Take back what the file with this module name registered, and the siblings of a script.

    Modules that a loaded file imported stay, and so do their entries.
    """
    sys.modules.pop(name, None)
    gone = {name} | (_SIBLINGS.pop(name, set()) - sys.modules.keys())
    for registry in _REGISTRIES.values():
        for key in [k for k, entry in registry.entries.items() if gone & registry.homes(entry)]:
            del registry.entries[key]


def left(name: str, siblings: Iterable[str]) -> None:
    """A script was run; `forget` also takes back what these modules, gone by then, registered."""
    _SIBLINGS[name] = {*siblings} - {name}


def _run(file: Path) -> UserFile:
    if not file.is_file():
        raise Error(f"there is no file {str(file)!r} to load")
    name = name_of(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Error(f"{str(file)!r} is no Python file; its name must end in .py")
    forget(name)  # what the file registered as a script
    before = {kind: {*registry.entries} for kind, registry in _REGISTRIES.items()}
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except BaseException as error:
        forget(name)
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise Error(f"{_place(file, error)}: {_what(error)}") from error
    found = UserFile(file.resolve(), module, _registered(module, file.read_bytes(), before))
    setattr(module, _LOADED, found)
    return found


def _registered(
    module: ModuleType, source: bytes, before: Mapping[str, set[Any]]
) -> dict[str, tuple[Any, ...]]:
    """The entries that are new, and those of modules that the file shares with an earlier one."""
    shared = _reached([module.__name__, *_imports(source)])
    return {
        kind: tuple(
            key
            for key, entry in registry.entries.items()
            if is_users(registry.homes(entry))
            and (key not in before.get(kind, ()) or registry.homes(entry) & shared)
        )
        for kind, registry in _REGISTRIES.items()
    }


def _imports(source: bytes) -> Iterator[str]:
    """What a file's import statements may name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reached(names: list[str]) -> set[str]:
    """The modules of these names that are loaded, and those that have given them what they hold;
    irc's own are left out, with what is behind them."""
    found: set[str] = set()
    ahead = [*names]
    while ahead:
        name = ahead.pop()
        if name in found or name not in sys.modules or not is_users({name}):
            continue
        found.add(name)
        held: dict[str, Any] = getattr(sys.modules[name], "__dict__", {})
        for value in list(held.values()):
            # isinstance would ask proxies, which may import or warn
            if issubclass(type(value), ModuleType):
                ahead.append(value.__name__)
            elif issubclass(type(value), (type, FunctionType)):
                ahead.append(value.__module__)
    return found


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
