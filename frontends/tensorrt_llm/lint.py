"""`lint_script`: what every use of TensorRT-LLM in a script is in irc; `find_release`: its release.

The script is read, not run, so that scripts whose packages or weights are missing can be checked.
Names, functions, classes, and their methods, attributes and arguments are looked up in `api.toml`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from ...errors import Error, TextError, did_you_mean
from . import api
from .api import RELEASES, ROOT, Row, Status
from .context import NEWEST, current_session, minor, new_session
from .sources import is_defined, package_folder, version_of

Kind = Literal["supported", "without effect", "only when off", "unchecked", "refused", "unknown"]
_WORK = ("refused", "unknown")
_EVERY = frozenset(RELEASES)
# The classes of attributes, and of what methods and functions return.
_CLASSES = {
    "builder.Builder.create_network": "network.Network",
    "builder.Builder.create_builder_config": "builder.BuilderConfig",
    "builder.build": "builder.Engine",
    "network.Network.plugin_config": "plugin.plugin.PluginConfig",
    "builder.BuildConfig.plugin_config": "plugin.plugin.PluginConfig",
    "functional.default_net": "network.Network",
    "_common.default_net": "network.Network",
    "network.default_net": "network.Network",
}
_STATEMENTS = {
    "requirements.txt": r"^tensorrt[_-]llm\s*[=~]=\s*(\d+\.\d+)",
    f"{ROOT}/version.py": r"^__version__ = .(\d+\.\d+)",
    "setup.py": r"name=.tensorrt_llm.,\s*version=.(\d+\.\d+)",
    f"{ROOT}/__init__.py": r"^__version__ = .(\d+\.\d+)",
}


@dataclass(frozen=True)
class Use:
    """One use of a name: line (from 1), the name as a path, what it is in irc, and why.

    A method that the table refuses is "unchecked" where the class of its object is not certain.
    """

    line: int
    name: str
    status: Kind
    why: str = ""


@dataclass(frozen=True)
class Report:
    """The uses in a script of a release, such as "0.7.1", in the order of its lines."""

    uses: list[Use]
    release: str = RELEASES[NEWEST]

    @property
    def score(self) -> float:
        """The share of the uses that irc takes, from 0 to 1; 1 where there is none."""
        checked = [use for use in self.uses if use.status != "unchecked"]
        taken = sum(use.status not in _WORK for use in checked)
        return taken / len(checked) if checked else 1.0


@dataclass(frozen=True)
class Reference:
    """One reference of a script to a path of the API, or to `.method` of an object of any class."""

    line: int
    path: str
    call: ast.Call | None = None  # where the path is called

    @property
    def count(self) -> int:
        """The number of arguments by position, as far as it is certain."""
        args = [] if self.call is None or self.path.startswith(".") else self.call.args
        return 0 if any(isinstance(argument, ast.Starred) for argument in args) else len(args)

    @property
    def keywords(self) -> list[tuple[str, ast.expr]]:
        """The arguments by name."""
        keywords = [] if self.call is None else self.call.keywords
        return [(keyword.arg, keyword.value) for keyword in keywords if keyword.arg is not None]


def parse_script(path: str | Path) -> ast.Module:
    """The syntax tree of a script; an Error with the place where it is not Python 3."""
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise Error(f"cannot read the script {path}: {error.strerror or error}") from None
    try:
        return ast.parse(source, str(path))
    except SyntaxError as error:
        before = "\n" * ((error.lineno or 1) - 1)
        text, at = before + (error.text or ""), len(before) + max((error.offset or 1) - 1, 0)
        raise TextError(f"not Python: {error.msg}", str(path), text, at) from None


def imported(tree: ast.Module) -> set[str]:
    """The top-level packages that a script imports anywhere."""
    return {path.partition(".")[0] for _, path in _bindings(tree)}


def is_build_script(path: str | Path) -> bool:
    """Whether a file is a script that builds its engines: it imports tensorrt_llm, and not irc."""
    if Path(path).suffix != ".py" or not Path(path).is_file():
        return False
    packages = imported(parse_script(path))
    return ROOT in packages and "irc" not in packages


def lint_script(
    path: str | Path, version: str | None = None, sources: str | Path | None = None
) -> Report:
    """What every name, argument, method and attribute of the API in a script is.

    `version` is the release that the script is written for; by default that of `sources`, the
    user's copy of TensorRT-LLM, or found in the text.
    """
    tree = parse_script(path)
    root = package_folder(sources) if sources else None
    release = version or (version_of(root) if root else None)
    release = release or RELEASES[find_release(tree, Path(path))]
    with new_session(release, sources=root):
        uses = dict.fromkeys(use for reference in references(tree) for use in _uses(reference))
    return Report(sorted(uses, key=lambda use: use.line), release)


# -- which release


def find_release(tree: ast.Module, path: Path | None = None) -> int:
    """The number N of the release 0.N of TensorRT-LLM that a script is written for.

    `requirements.txt` beside the script states it, or the source tree that it lies in; else it is
    the one in which most of its references are valid, and of the modules that it imports from its
    folder: of several the latest, and 0.7 where 0.7 and the first of later ones still have the
    same names.
    """
    if path is not None and (stated := _stated_version(path)) is not None:
        return minor(stated)
    names = imported(tree) if path is not None else ()
    files = [file for name in names if (file := Path(path or "").parent / f"{name}.py").is_file()]
    trees = [tree, *map(parse_script, files)]
    valid = [_releases(reference) for one in trees for reference in references(one)]
    counts = {release: sum(release in releases for releases in valid) for release in RELEASES}
    best = [release for release in RELEASES if counts[release] == max(counts.values())]
    return 7 if 7 in best and NEWEST not in best else best[-1]


def _stated_version(path: Path) -> str | None:
    """The version that a file near a script states; None where none does."""
    for folder in path.resolve().parents:
        for name, pattern in _STATEMENTS.items():
            file = folder / name
            text = file.read_text(errors="replace") if file.is_file() else ""
            if stated := re.search(pattern, text, re.MULTILINE):
                return stated[1]
    return None


def _releases(reference: Reference) -> frozenset[int]:
    """The releases in which a reference is valid; all for what the table does not know."""
    path = reference.path
    if path.startswith("."):
        several = [_valid(row, reference) for row in _methods().get(path, ())]
        return frozenset[int]().union(*several) or _EVERY
    row, (owner, _, name) = api.row_of(path), path.rpartition(".")
    if row is not None:
        # of a package that exports the name nothing is known
        return _valid(row if row.path == path else replace(row, releases=_EVERY), reference)
    if owner in api.rows():
        having = [attr.releases for attr in api.rows()[owner].attributes if attr.name == name]
        return frozenset[int]().union(*having) or _EVERY
    # a model that irc lacks is constructed from sizes; from 0.8 on it takes a config
    is_model = path.startswith("models.") and name[:1].isupper()
    return frozenset({5, 6, 7}) if is_model and len(reference.keywords) > 2 else _EVERY


@cache
def _methods() -> dict[str, list[Row]]:
    """The rows of the methods of any class, by `.name`."""
    methods: dict[str, list[Row]] = {}
    for path, row in api.rows().items():
        owner, _, name = path.rpartition(".")
        if api.is_class(owner):
            methods.setdefault(f".{name}", []).append(row)
    return methods


def _valid(row: Row, reference: Reference) -> frozenset[int]:
    """The releases in which a row has the arguments of a call, or the row where none has them."""
    valid = row.releases
    if reference.call is None or not row.arguments:
        return valid
    for keyword, _ in reference.keywords:
        having = [argument.releases for argument in row.arguments if argument.name == keyword]
        valid &= frozenset[int]().union(*having) if having else _EVERY
    return frozenset(n for n in valid if len(row.of(n)[0]) >= reference.count) or valid


# -- what a reference is


def _uses(reference: Reference) -> Iterator[Use]:
    """The use of the path itself, and of the arguments that are not simply taken."""
    line, path = reference.line, reference.path
    if path.startswith("."):
        note = api.noted(path)
        if note is not None and note.kind == "refused":
            yield Use(line, path, "unchecked", f"in a class of TensorRT-LLM: {note.why}")
        return
    path, status = _status(path)
    shown = f"{ROOT}.{path}".rstrip(".")
    yield Use(line, shown, status.kind, status.why)
    row = api.row_of(path)
    if reference.call is None or row is None or status.kind != "supported" or not row.arguments:
        return
    release = current_session().release
    by_position = [argument.name for argument in row.of(release)[0]]
    if reference.count > len(by_position):
        takes = f"{RELEASES[release]} takes {len(by_position)} arguments by position"
        yield Use(line, shown, "unknown", f"{takes}, found {reference.count}")
    for name in by_position[: reference.count]:
        yield from _argument(line, row, name, None)
    for name, value in reference.keywords:
        yield from _argument(value.lineno, row, name, value)


def _argument(line: int, row: Row, name: str, value: ast.expr | None) -> Iterator[Use]:
    """What an argument is, unless it is supported or literally off."""
    shown, status = f"{row.path}({name}=)", api.argument_status(row.path, name)
    if status.kind == "supported":
        return
    if name not in row.names:
        if not row.takes_any:
            near = did_you_mean(name, sorted(row.names))
            yield Use(line, shown, "unknown", f"no such argument is known{near}")
    elif status.kind == "without effect":
        yield Use(line, shown, "without effect", status.why)
    else:
        why = status.why or "irc has no counterpart; leave it out"
        if not isinstance(value, ast.Constant):
            yield Use(line, shown, "only when off", f"it may be None, False or 0: {why}")
        elif value.value:
            yield Use(line, shown, "refused", why)


def _status(path: str) -> tuple[str, Status]:
    """(the part of a path that is a name, what it is)."""
    parts = path.split(".")
    depth = 0
    while depth < len(parts) and api.is_module(".".join(parts[: depth + 1])):
        depth += 1
    module, own = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
    status = api.status(own)
    if status.kind in _WORK and is_defined(own):
        return own, Status("supported", "from your copy of the sources")
    if depth == len(parts) or not path:
        return path, status if status.kind != "unknown" else api.SUPPORTED
    if status.kind == "unknown":
        name = parts[depth]
        near = api.suggestion(module, name) or did_you_mean(name, sorted(api.modules()))
        return own, Status("unknown", f"no such name is known{near}")
    if status.kind == "supported" and len(parts) == depth + 2:
        return path, _member(own, parts[-1])
    return own, status


def _member(owner: str, name: str) -> Status:
    """What a method or attribute of a class is; of another object, what the object is."""
    target, row = api.find(owner), api.row_of(owner)
    note = api.noted(f"{row.path if row else owner}.{name}")
    if note is not None:
        return note
    if row is None or not isinstance(target, type) or hasattr(target, name):
        return api.SUPPORTED
    if hasattr(target, "__getattr__") and f"{row.path}.{name}" in api.rows():
        return api.SUPPORTED
    classes = (row, *api.rows_of_classes(target.__mro__))
    attributes = [attr for base in classes for attr in (*base.attributes, *base.arguments)]
    release = current_session().release
    if any(attr.name == name and release in attr.releases for attr in attributes):
        return api.SUPPORTED
    names = [attr.name for attr in attributes] + [other for other in dir(target) if other[0] != "_"]
    return Status("unknown", f"no such attribute is known{did_you_mean(name, names)}")


# -- the references of a script


def _bindings(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(local name, dotted path) of every absolute import; `*` stands for itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or path, path
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def references(tree: ast.Module) -> list[Reference]:
    """Every reference to the API in a script."""
    return list(dict.fromkeys(_Scan(tree).references))


class _Scan(ast.NodeVisitor):
    """Collects references, by the paths of imported names and the classes of variables."""

    def __init__(self, tree: ast.Module) -> None:
        bindings = list(_bindings(tree))
        self.stars = [_below(path)[:-2] for name, path in bindings if name == "*" and _is_api(path)]
        self.imported = {n: _below(path) for n, path in dict(bindings).items() if _is_api(path)}
        self.classes: dict[str, str] = {}
        for _ in range(3):  # what one assignment tells, the next may need
            self.classes = self._learned(tree)
        self.references: list[Reference] = []
        self.visit(tree)

    def _learned(self, tree: ast.Module) -> dict[str, str]:
        """The classes of variables; "" for those that have several, or one that is not known."""
        classes: dict[str, str] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[target], value=value):
                    class_path = self._class_of(value)
                case ast.AnnAssign(target=target, annotation=annotation):
                    class_path = self._class_at(self._path(annotation))
                case ast.arg(arg=name, annotation=annotation):
                    path = None if annotation is None else self._path(annotation)
                    target, class_path = ast.Name(name), self._class_at(path)
                case ast.For(target=target) | ast.withitem(optional_vars=ast.expr() as target):
                    class_path = ""
                case _:
                    continue
            name = ast.unparse(target)
            classes[name] = class_path if classes.get(name, class_path) == class_path else ""
        return classes

    def _class_at(self, path: str | None) -> str:
        """The class with this path; "" if it is none."""
        row = api.row_of(path) if path else None
        return row.path if row is not None and api.is_class(row.path) else ""

    def _class_of(self, value: ast.expr) -> str:
        """The class of the value of an expression, if it is certain and one of the API; else ""."""
        if variable := self.classes.get(ast.unparse(value)):
            return variable
        if not isinstance(value, ast.Call):
            return _CLASSES.get(self._path(value) or "", "")
        path = self._path(value.func) or ""
        owner, _, name = path.rpartition(".")
        constructed = self._class_at(path) or (name.startswith("from_") and self._class_at(owner))
        return constructed or _CLASSES.get(path, "")

    def _path(self, node: ast.expr) -> str | None:
        """The path that a name, or attributes of one, stand for; None for other expressions."""
        if isinstance(node, ast.Name):
            stars = (star for star in self.stars if f"{star}.{node.id}" in api.rows())
            star = next((f"{star}.{node.id}" for star in stars), None)
            return self.imported.get(node.id, star)
        if not isinstance(node, ast.Attribute):
            return None
        base = self._class_of(node.value) or self._path(node.value)
        return None if base is None else f"{base}.{node.attr}".lstrip(".")

    def _add(self, node: ast.expr | ast.stmt, path: str, call: ast.Call | None = None) -> None:
        line = node.lineno if call is None else node.end_lineno or node.lineno
        self.references.append(Reference(line, path, call))

    def visit_Import(self, node: ast.Import) -> None:
        for path in filter(_is_api, (alias.name for alias in node.names)):
            self._add(node, _below(path))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and _is_api(module := node.module or ""):
            for alias in node.names:
                self._add(node, _below(module if alias.name == "*" else f"{module}.{alias.name}"))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (path := self._path(node)) is not None:
            self._add(node, path)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (path := self._path(node)) is not None:
            self._add(node, path)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function, path = node.func, self._path(node.func)
        forward = f"{self._class_of(function)}.forward" if path is None else ""
        path = forward if forward in api.rows() else path  # a layer is called
        is_method = isinstance(function, ast.Attribute)
        if path is not None:
            self._add(function, path, node)
        elif is_method:
            self._add(function, f".{function.attr}", node)
        if path is None or path == forward:
            self.visit(function)
        elif is_method:
            self.visit(function.value)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)


def _is_api(path: str) -> bool:
    return path == ROOT or path.startswith(f"{ROOT}.")


def _below(path: str) -> str:
    """A path below `tensorrt_llm`."""
    return path[len(ROOT) + 1 :]


def as_rows(report: Report) -> list[tuple[Use, list[int]]]:
    """Equal uses together, with their lines; those that need work first."""
    grouped: dict[Use, list[int]] = {}
    for use in report.uses:
        grouped.setdefault(replace(use, line=0), []).append(use.line)
    order = ("refused", "unknown", "unchecked", "only when off", "without effect", "supported")
    return sorted(grouped.items(), key=lambda row: (order.index(row[0].status), row[1][0]))
