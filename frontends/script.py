"""`load_script`: runs a factory of `script.py[:factory]` with settings from the command line."""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from ..errors import Error, did_you_mean
from ..extensions.user_files import blamed, forget, is_near, loaded, name_of, remember_siblings
from ..ir.core import Module
from .huggingface import bind
from .huggingface.binding import has_unbound
from .settings import convert
from .tensor import kind_name

DEFAULT_FACTORY = "build"
OPTIONS = ("checkpoint", "dtype")  # parameters that have command-line options


def load_script(
    script: str,
    settings: Mapping[str, Any] | None = None,
    checkpoint: str | None = None,
    dtype: str | None = None,
) -> Module:
    """The module that a factory of a script returns.

    `script` is `path.py` or `path.py:factory`; the default factory is `build`. It is called with
    `settings` (text is converted by its annotations), and with `checkpoint` and `dtype` if it has
    parameters of these names. Weights that it left unbound are bound to the checkpoint. An
    exception of the script becomes an Error with its line, whose cause it is. Output of the script
    goes to standard error. `import tensorrt_llm` finds irc's frontend.
    """
    path, name = split_name(script)
    if script == str(path):
        _check_has_factory(path, name)
    with _api_of(path), _imported(path) as namespace:
        factory = _factory(namespace, path, name)
        arguments = _arguments(factory, path, settings or {}, checkpoint, dtype)
        with blamed(path), redirect_stdout(sys.stderr):
            module = factory(**arguments)
    if not isinstance(module, Module):
        raise Error(
            f"{factory.__name__} of {path} returned {kind_name(module)}, not a traced module; "
            "end it with `return irc.trace(model, inputs=...)`"
        )
    if checkpoint is not None and has_unbound(module):
        bind(module, checkpoint)
    return module


def split_name(script: str) -> tuple[Path, str]:
    """(path, factory) of `path.py[:factory]`."""
    path, colon, name = script.rpartition(":")
    if not colon or os.sep in name or not path.endswith(".py"):
        path, name = script, ""
    return Path(path), name or DEFAULT_FACTORY


def mentions_tensorrt_llm(path: str | Path) -> bool:
    """Whether a path is a Python file with this word, which then may import it."""
    path = Path(path)
    return path.suffix == ".py" and path.is_file() and b"tensorrt_llm" in path.read_bytes()


def _check_has_factory(path: Path, name: str) -> None:
    """An Error about a script that builds its engines by itself."""
    if not mentions_tensorrt_llm(path):
        return
    from .tensorrt_llm.lint import is_build_script

    if is_build_script(path):
        raise Error(
            f"{path} imports tensorrt_llm and not irc, so it is run as a script that builds "
            f"engines: irc compile {path} -o DIR -- ARGUMENTS; use DIR, or name a factory that "
            f"returns irc.trace(...), as in {path}:{name}"
        )


def _api_of(path: Path) -> AbstractContextManager[None]:
    """`aliases` where a script mentions tensorrt_llm; others find what is installed."""
    if not mentions_tensorrt_llm(path):
        return nullcontext()
    from .tensorrt_llm.aliases import aliases

    return aliases()


@contextmanager
def _imported(path: Path) -> Generator[types.ModuleType]:
    """The script as a module. A file that was loaded with --load is not run again.

    Registrations of an earlier run of the script are removed.
    """
    earlier = loaded(path)
    if earlier is not None:
        yield earlier.module
        return
    name = name_of(path)
    forget(name)
    with executed(path, name) as module:
        yield module


@contextmanager
def executed(path: Path, name: str) -> Generator[types.ModuleType]:
    """The script run as a module called `name`.

    Afterwards it is removed, with the sibling files that it imported. A script that runs as
    `__main__` may end by `sys.exit()`.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise Error(f"cannot read the script {path}: {error.strerror or error}") from None
    folder = str(path.resolve().parent)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    before = dict(sys.modules)
    sys.modules[name] = module  # dataclasses and annotations look themselves up there
    sys.path.insert(0, folder)
    try:
        with blamed(path), redirect_stdout(sys.stderr):
            # not by the import system, whose cache compares whole seconds
            code = compile(source, str(path), "exec")
            try:
                exec(code, module.__dict__)
            except SystemExit as end:
                if name != "__main__" or end.code not in (None, 0):
                    raise
        yield module
    finally:
        sys.path.remove(folder)
        _forget(before, folder, name)


def _forget(before: Mapping[str, types.ModuleType], folder: str, name: str) -> None:
    """Remove the modules in the script's folder or below that it imported from sys.modules."""
    removed: list[str] = []
    for key, module in list(sys.modules.items()):
        if key == name or (key not in before and _is_local(module, Path(folder))):
            del sys.modules[key]
            removed.append(key)
    remember_siblings(name, removed)
    if name in before:
        sys.modules[name] = before[name]


def _is_local(module: types.ModuleType, folder: Path) -> bool:
    """Whether a module is from a folder or below; one without a file is a folder itself."""
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return isinstance(file, str) and is_near(file, folder)


def _factory(namespace: types.ModuleType, path: Path, name: str) -> Callable[..., Any]:
    factory = getattr(namespace, name, None)
    if callable(factory) and not name.startswith("_"):
        return factory
    own = [
        key
        for key, value in vars(namespace).items()
        if inspect.isfunction(value) and value.__module__ == namespace.__name__ and key[0] != "_"
    ]
    if not own:
        raise Error(
            f"{path} defines no function {name!r}, and no other; define `def {name}(...)` that "
            "returns irc.trace(...)"
        )
    raise Error(
        f"{path} defines no function {name!r}{did_you_mean(name, own)}; it defines "
        f"{', '.join(own)}. Name one, as in {path}:{own[0]}"
    )


def _arguments(
    factory: Callable[..., Any],
    path: Path,
    settings: Mapping[str, Any],
    checkpoint: str | None,
    dtype: str | None,
) -> dict[str, Any]:
    title = f"{getattr(factory, '__name__', 'the factory')} of {path}"
    parameters = _parameters(factory, title)
    arguments: dict[str, Any] = {}
    for name, value in (("checkpoint", checkpoint), ("dtype", dtype)):
        if value is None:
            continue
        if name in parameters:
            arguments[name] = convert(name, value, parameters[name], title)
        elif name == "dtype":
            raise Error(
                f"{title} has no parameter `dtype`, so --dtype {value} has no effect; add it"
            )
    free = [name for name in parameters if name not in OPTIONS]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in settings.items():
        if name in OPTIONS:
            raise Error(f"give {name} as --{name}, not with --set")
        if name not in parameters and not open_ended:
            takes = f"it takes {', '.join(free)}" if free else "it takes no settings"
            raise Error(f"{title} has no setting {name!r}{did_you_mean(name, free)}; {takes}")
        parameter = parameters.get(name)
        arguments[name] = convert(name, value, parameter, title) if parameter else value
    _check_complete(parameters, arguments, title)
    return arguments


def _parameters(factory: Callable[..., Any], title: str) -> dict[str, inspect.Parameter]:
    try:
        signature = inspect.signature(factory, eval_str=True)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise Error(f"cannot read the parameters of {title}: {error}") from None
    return dict(signature.parameters)


def _check_complete(
    parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], title: str
) -> None:
    for name, parameter in parameters.items():
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if variadic or name in arguments or parameter.default is not parameter.empty:
            continue
        how = f"--{name} ..." if name in OPTIONS else f"--set {name}=..."
        raise Error(f"{title} needs {name}; give {how}")
