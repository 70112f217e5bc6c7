"""The user's Python files, which register passes, operations or plugins.

A file that is loaded (`--load`, `--plugin`) is run once per process, also if it is the model
script. A script that is not loaded is run at every use; its entries stay until it is run again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, MutableMapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from ..errors import Error, TextError
from ..source import Loc, is_own, raised_at, shown_path

_PREFIX = "irc_loaded_"
_LOADED = "__irc_user_file__"  # in a module that was run here: its UserFile
_LIBRARY = Path(os.__file__).resolve().parent  # Python's own modules
_RUNNING = RLock()  # ranks that are threads load the same files
_SIBLINGS: dict[str, set[str]] = {}  # the modules that a script imported, by its module name


@dataclass(frozen=True)
class UserFile:
    """A file that was run. `registered` has the keys of its new entries, by kind."""

    path: Path
    module: ModuleType
    registered: Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class _Registry:
    entries: MutableMapping[Any, Any]
    modules: Callable[[Any], set[str]]


_REGISTRIES: dict[str, _Registry] = {}


def defining_modules(*items: Any) -> set[str]:
    """The modules of functions and classes, "" where one has no `__module__`."""
    unwrapped = (item.func if isinstance(item, partial) else item for item in items)
    return {getattr(item, "__module__", None) or "" for item in unwrapped}


def is_users(modules: set[str]) -> bool:
    """Whether an entry made by these modules is a user's: not all of them are irc's own."""
    return any(name != "irc" and not name.startswith("irc.") for name in modules)


def watch(
    kind: str,
    entries: MutableMapping[Any, Any],
    modules: Callable[[Any], set[str]] = defining_modules,
) -> None:
    """Track the entries that user files register; `modules` are those that define an entry."""
    _REGISTRIES[kind] = _Registry(entries, modules)


def run(path: str | Path, kinds: tuple[str, ...], nothing: str) -> UserFile:
    """Run a file unless it has run in this process; the file with its entries.

    Its output goes to standard error. An Error names the line at which the file fails, or says
    `nothing` if it has no entry of these kinds; then all its entries are removed.
    """
    file = Path(path)
    with _RUNNING:
        earlier = loaded(file)
        file_run = earlier or _run(file)
        if not any(file_run.registered.get(kind) for kind in kinds):
            if earlier is None:
                forget(file_run.module.__name__)
            raise Error(f"{file.name} {nothing}")
        return file_run


def loaded(path: str | Path) -> UserFile | None:
    """The file at a path, if it was run."""
    return getattr(sys.modules.get(name_of(path)), _LOADED, None)


def files() -> list[UserFile]:
    """All files that were run, in order."""
    named = [module for name, module in sys.modules.items() if name.startswith(_PREFIX)]
    return [getattr(module, _LOADED) for module in named if hasattr(module, _LOADED)]


def name_of(path: str | Path) -> str:
    """The module name of the file at a path, whether it is loaded or run as a script."""
    return _PREFIX + hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:12]


def origin(cls: type) -> str:
    """Where a class is defined: the path of a user's file, else the name of the module."""
    name = cls.__module__
    return str(
        getattr(sys.modules.get(name), "__file__", name) if name.startswith(_PREFIX) else name
    )


def forget(name: str) -> None:
    """Remove the entries of the file with this module name, and those of a script's siblings.

    The modules that a loaded file imported stay, and so do their entries.
    """
    sys.modules.pop(name, None)
    gone = {name} | (_SIBLINGS.pop(name, set()) - sys.modules.keys())
    for registry in _REGISTRIES.values():
        for key in [k for k, entry in registry.entries.items() if gone & registry.modules(entry)]:
            del registry.entries[key]


def remember_siblings(name: str, siblings: Iterable[str]) -> None:
    """Let `forget` of a script also remove the entries of these modules, which it imported."""
    _SIBLINGS[name] = {*siblings} - {name}


def _run(file: Path) -> UserFile:
    if not file.is_file():
        raise Error(f"there is no file {str(file)!r} to load")
    name = name_of(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Error(f"{str(file)!r} is not a Python file; its name must end in .py")
    forget(name)  # the entries of the same file as a script
    before = {kind: {*registry.entries} for kind, registry in _REGISTRIES.items()}
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with blamed(file), redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except BaseException:
        forget(name)
        raise
    registered = {
        kind: tuple(
            key
            for key, entry in registry.entries.items()
            if key not in before.get(kind, ()) and is_users(registry.modules(entry))
        )
        for kind, registry in _REGISTRIES.items()
    }
    file_run = UserFile(file.resolve(), module, registered)
    setattr(module, _LOADED, file_run)
    return file_run


@contextmanager
def blamed(path: Path) -> Generator[None]:
    """Turn an exception of the user's code into an Error at its line, with the exception as cause.

    The line is the innermost one of a file in the folder of `path` or below.
    """
    try:
        yield
    except Error as error:
        if error.op is None:
            error.at(loc=_line(error, path))
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):
            raise _not_python(error, str(error.filename)) from error
        text = "".join(traceback.format_exception_only(error)).strip()
        raise Error(text, loc=_line(error, path)) from error


def _not_python(error: SyntaxError, file: str) -> Error:
    """The Error with a caret where Python cannot go on."""
    before = "\n" * ((error.lineno or 1) - 1)
    at = len(before) + max((error.offset or 1) - 1, 0)
    return TextError(f"not Python: {error.msg}", shown_path(file), before + (error.text or ""), at)


def _line(error: BaseException, path: Path) -> Loc:
    folder = path.resolve().parent
    near = raised_at(error, lambda file: is_near(file, folder))
    return near or Loc(shown_path(str(path)), 1)


def is_near(file: str, folder: Path) -> bool:
    """Whether a file is in a folder or below, but not one of irc or a library."""
    path = Path(file).resolve()
    if file.startswith("<") or is_own(str(path)) or path.is_relative_to(_LIBRARY):
        return False
    return path.is_relative_to(folder) and not {"site-packages", "dist-packages"} & {*path.parts}
