"""What irc does not have, from the user's own copy of TensorRT-LLM (`--tensorrt-llm-sources DIR`).

Its models are plain Python over `functional` and `layers`. A module of which irc has nothing is
loaded from its file; of one that irc has partly, the missing definitions are run, each with those
that it needs. Both find irc's names first. The package itself is never imported, nor a binary.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import copy
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from ...errors import Error
from ...source import raised_at
from .api import ROOT, names_of
from .context import current_session

# Packages and modules that work on TensorRT itself: what irc lacks of them is refused when used.
_ON_TENSORRT = ("functional", "plugin", "runtime", "network", "builder", "_common", "bindings",
                "graph_rewriting", "auto_parallel", "executor", "llmapi", "hlapi")  # fmt: skip


def package_folder(folder: str | Path) -> Path:
    """The package in a source tree or an installation; an Error where there is none."""
    root = Path(folder).absolute()
    for candidate in (root, root / ROOT):
        if (candidate / "functional.py").is_file():
            return candidate
    raise Error(
        f"expected the sources of TensorRT-LLM in {folder}: a source tree or an installed package, "
        f"with {ROOT}/functional.py; there is none"
    )


def version_of(folder: Path) -> str | None:
    """The version that a package folder states, such as 0.7.1."""
    file = folder / "version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    stated = re.search(r"""__version__\s*=\s*["']([\d.]+\d)""", text)
    return stated[1] if stated else None


def source_of(module: str) -> Path | None:
    """The file of a module below tensorrt_llm in the session's sources, if there are any."""
    root = current_session().sources
    if root is None:
        return None
    path = root.joinpath(*module.split(".")) if module else root
    files = (path / "__init__.py", path.with_suffix(".py")) if module else (path / "__init__.py",)
    return next((file for file in files if file.is_file()), None)


def source_spec(module: str) -> ModuleSpec | None:
    """How to load a module, of which irc has nothing, from the session's sources."""
    file = source_of(module)
    if file is None or not module or module.partition(".")[0] in _ON_TENSORRT:
        return None
    if any(names_of(module)):
        return None
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    return spec_from_file_location(f"{ROOT}.{module}", file, submodule_search_locations=folders)


def is_defined(path: str) -> bool:
    """Whether a name that irc lacks comes from the session's sources."""
    module, _, name = path.rpartition(".")
    if source_spec(path) is not None:
        return True
    is_read = module.partition(".")[0] not in _ON_TENSORRT and source_of(module) is not None
    return is_read and Definitions(module, _nothing, _nothing).defines(name)


def _nothing(path: str, why: str = "") -> None:
    """No object of a name."""


@contextmanager
def sources_blamed() -> Generator[None]:
    """Let an Error of the block tell the line of the sources that it was raised at, if it was."""
    try:
        yield
    except Error as error:
        root = current_session().sources
        if root is not None and error.op is None:
            cause = error.__cause__ or error
            error.loc = raised_at(cause, lambda file: file.startswith(f"{root}/")) or error.loc
        raise


class Definitions:
    """The definitions of a module in the session's sources, if it is there; each is run when it is
    first needed.

    `own` gives irc's object of a name, or None; `refuse` makes an object for a name that cannot be
    imported, which raises an Error with the reason when it is used.
    """

    def __init__(
        self, module: str, own: Callable[[str], Any], refuse: Callable[[str, str], Any]
    ) -> None:
        self._module, self._own, self._refuse = module, own, refuse
        self._file = file = source_of(module) or Path()
        body = ast.parse(file.read_bytes(), str(file)).body if file.name else []
        imports = [node for node in body if isinstance(node, ast.ImportFrom)]
        self._future: list[ast.stmt] = [node for node in imports if node.module == "__future__"]
        self._statements: dict[str, list[ast.stmt]] = {}
        for statement in body:
            for name in _bound(statement):
                self._statements.setdefault(name, []).append(statement)
        self._done: set[tuple[ast.stmt, str]] = set()
        name = f"{ROOT}.{module}".rstrip(".")
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        self._values: dict[str, Any] = {
            "__name__": name,
            "__file__": str(file),
            "__package__": package,
        }

    def defines(self, name: str) -> bool:
        """Whether the module binds a name."""
        return name in self._statements

    def get(self, name: str) -> Any:
        """What the module defines under a name, or None."""
        if name not in self._statements:
            return None
        if self._module.partition(".")[0] in _ON_TENSORRT:
            why = "it works on TensorRT's own network or engines"
            return self._refuse(f"{ROOT}.{self._path(name)}", why)
        if name not in self._values:
            self._run(name)
        return self._values[name]

    def _path(self, name: str) -> str:
        return f"{self._module}.{name}".lstrip(".")

    def _run(self, name: str) -> None:
        """Run the statements that bind a name, behind those that bind what they use."""
        for statement in self._statements[name]:
            is_import = isinstance(statement, ast.Import | ast.ImportFrom)
            key = statement, name if is_import else ""
            if key in self._done:
                continue
            self._done.add(key)
            if is_import:
                self._import(statement, name)
                continue
            for used in dict.fromkeys(_used(statement)):
                if used not in self._values and not hasattr(builtins, used):
                    self._provide(used)
            self._execute(statement)

    def _provide(self, name: str) -> None:
        value = self._own(self._path(name))
        if value is not None:
            self._values[name] = value
        elif name in self._statements:
            self._run(name)

    def _import(self, statement: ast.Import | ast.ImportFrom, name: str) -> None:
        """Import one name of a statement; what cannot be imported is refused when it is used."""
        single = copy(statement)
        single.names = [alias for alias in statement.names if _imported_name(alias) == name]
        try:
            self._execute(single)
        except (ImportError, Error) as error:
            why = f"{self._file}:{statement.lineno} cannot import it: {error}"
            self._values[name] = self._refuse(f"{ROOT}.{self._path(name)}", why)

    def _execute(self, statement: ast.stmt) -> None:
        tree = ast.Module([*self._future, statement], [])
        exec(compile(tree, str(self._file), "exec", dont_inherit=True), self._values)


def _imported_name(alias: ast.alias) -> str:
    """The name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module binds."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from map(_imported_name, names)
        case _:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id
                elif node is not statement and isinstance(
                    node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
                ):
                    yield from _bound(node)


def _used(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement reads, now or when a function of it is called."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            yield str(node.value)  # an annotation may be written as text
