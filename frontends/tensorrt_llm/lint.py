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
from .context import NEWEST, OLDEST, current_session, minor, new_session

Kind = Literal["supported", "without effect", "only when off", "refused", "unknown"]
_TAKEN = ("supported", "without effect", "only when off")
# What methods and functions return, beside classes, whose constructors return themselves.
_RETURNS = {
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
    """One use of a name: line (from 1), the name as a path, what it is in irc, and why."""

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
        taken = sum(use.status in _TAKEN for use in self.uses)
        return taken / len(self.uses) if self.uses else 1.0


@dataclass(frozen=True)
class Reference:
    """One reference of a script to a path of the API; a call has its arguments.

    `positional` counts arguments by position (None where `*args` hides it), `keywords` has the
    nodes of those by name.
    """

    line: int
    path: str
    is_call: bool = False
    positional: int | None = 0
    keywords: tuple[ast.keyword, ...] = ()


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


def lint_script(path: str | Path, version: str | None = None) -> Report:
    """What every name, argument, method and attribute of the API in a script is.

    `version` is the release that the script is written for; by default it is found in the text.
    """
    tree = parse_script(path)
    release = version or RELEASES[find_release(tree, Path(path))]
    with new_session(release):
        uses = dict.fromkeys(use for each in references(tree) for use in _uses(each))
    return Report(sorted(uses, key=lambda use: use.line), release)


# -- which release


def find_release(tree: ast.Module, path: Path | None = None) -> int:
    """The number N of the release 0.N of TensorRT-LLM that a script is written for.

    `requirements.txt` beside the script states it, or the source tree that it lies in; else it is
    the one in which most of its references are valid, those of its sibling modules included: of
    several the latest, and 0.7 where 0.7 and the first of later ones still have the same names.
    """
    if path is not None and (stated := _stated_version(path)) is not None:
        return minor(stated)
    trees = [tree, *(_siblings(tree, path.parent) if path is not None else ())]
    valid = [_releases(each) for one in trees for each in references(one)]
    counts = {release: sum(release in each for each in valid) for release in RELEASES}
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


def _siblings(tree: ast.Module, folder: Path) -> Iterator[ast.Module]:
    """The modules of a folder that a script imports, and those that they import."""
    waiting, seen = [tree], set[Path]()
    while waiting:
        for _, name in _bindings(waiting.pop()):
            file = folder.joinpath(*name.split(".")[:1]).with_suffix(".py")
            if file in seen or not file.is_file():
                continue
            seen.add(file)
            try:
                waiting.append(parse_script(file))
            except Error:
                continue  # the script's own import says so
            yield waiting[-1]


def _releases(reference: Reference) -> frozenset[int]:
    """The releases in which a reference is valid; all for what the table does not know."""
    every = frozenset(RELEASES)
    if reference.path.startswith("."):
        several = [_with_keywords(row, reference) for row in _methods().get(reference.path, ())]
        return frozenset[int]().union(*several) or every
    row = _row(reference.path)
    if row is None and reference.is_call and _is_model_with_keywords(reference):
        return frozenset(range(OLDEST, 8))
    return every if row is None else _with_keywords(row, reference)


def _is_model_with_keywords(reference: Reference) -> bool:
    """Whether a model is constructed from sizes; from 0.8 on it takes a config."""
    is_class = reference.path.rpartition(".")[2][:1].isupper()
    return reference.path.startswith("models.") and is_class and len(reference.keywords) > 2


@cache
def _methods() -> dict[str, list[Row]]:
    """The rows of the methods of any class, by `.name`."""
    methods: dict[str, list[Row]] = {}
    for path, row in api.rows().items():
        owner, _, name = path.rpartition(".")
        if owner.rpartition(".")[2][:1].isupper():
            methods.setdefault(f".{name}", []).append(row)
    return methods


def _with_keywords(row: Row, reference: Reference) -> frozenset[int]:
    """The releases in which a row has the arguments of a call, or the row where none has them."""
    every = frozenset(RELEASES)
    is_own = row.path == reference.path or reference.path.startswith(".")
    valid = row.releases if is_own else every  # of an exporting package nothing is known
    if not reference.is_call or not row.arguments:
        return valid
    for keyword in reference.keywords:
        having = [each.releases for each in row.arguments if each.name == keyword.arg]
        valid &= frozenset[int]().union(*having) if having else every
    count = reference.positional or 0
    having_count = frozenset(n for n in valid if len(row.of(n)[0]) >= count)
    return having_count or valid


def _row(path: str) -> Row | None:
    """The row of a path; that of an attribute, or of the name that a package exports."""
    rows = api.rows()
    if path in rows:
        return rows[path]
    owner, _, name = path.rpartition(".")
    if owner in rows:
        having = [
            each for each in rows[owner].attributes + rows[owner].members if each.name == name
        ]
        releases = frozenset[int]().union(*(each.releases for each in having))
        return Row(path, releases) if having else None
    return rows.get(next(iter(_exported(owner, name)), "")) or rows.get(api.alias_of(path) or "")


@cache
def _exported(package: str, name: str) -> list[str]:
    """The paths of the functions and classes of a name that a module may export, nearest first."""
    if package.rpartition(".")[2][:1].isupper():
        return []
    paths = [each for each in api.rows() if each.rpartition(".")[2] == name]
    plain = [each for each in paths if not each.rpartition(".")[0].rpartition(".")[2][:1].isupper()]
    return sorted(plain, key=lambda each: not each.startswith(f"{package}."))


# -- what a reference is


def _uses(reference: Reference) -> Iterator[Use]:
    """The use of the path itself, and of the arguments that are not simply taken."""
    if reference.path.startswith("."):  # a method of an object whose class is not known
        noted = api.noted("", reference.path[1:])
        if noted is not None:
            yield Use(reference.line, reference.path, noted.kind, noted.why)
        return
    path, status = _status(reference.path)
    shown = f"{ROOT}.{path}" if path else ROOT
    yield Use(reference.line, shown, status.kind, status.why)
    row = _row(path)
    if not reference.is_call or row is None or status.kind != "supported" or not row.arguments:
        return
    release = current_session().release
    by_position = row.of(release)[0]
    count = reference.positional or 0
    if count > len(by_position):
        why = f"{RELEASES[release]} takes {len(by_position)} arguments by position, found {count}"
        yield Use(reference.line, shown, "unknown", why)
    for argument in by_position[:count]:
        yield from _argument(reference.line, row, argument.name, None)
    for keyword in reference.keywords:
        if keyword.arg is not None:
            yield from _argument(keyword.value.lineno, row, keyword.arg, keyword.value)


def _argument(line: int, row: Row, name: str, value: ast.expr | None) -> Iterator[Use]:
    """What an argument is, unless it is supported or literally off."""
    shown = f"{row.path.removesuffix('.__init__')}({name}=)"
    if name not in row.names | (api.implemented(row.path) or frozenset()):
        if not row.takes_any:
            near = did_you_mean(name, sorted(row.names))
            yield Use(line, shown, "unknown", f"no such argument is known{near}")
        return
    status = api.argument_status(row.path, name)
    if status.kind == "without effect":
        yield Use(line, shown, "without effect", status.why)
    elif status.kind == "refused" or (status.kind == "unknown" and api.is_bound(row.path)):
        why = status.why or "irc has no counterpart; leave it out"
        if not isinstance(value, ast.Constant):
            yield Use(line, shown, "only when off", f"it may be None, False or 0: {why}")
        elif value.value:
            yield Use(line, shown, "refused", why)


def _status(path: str) -> tuple[str, Status]:
    """(the part of a path that is a name, what it is)."""
    parts = path.split(".") if path else []
    depth = 0
    while depth < len(parts) and api.is_module(".".join(parts[: depth + 1])):
        depth += 1
    if depth == len(parts):
        status = api.status(path) if path else api.SUPPORTED
        return path, status if status.kind != "unknown" else api.SUPPORTED
    module, name = ".".join(parts[:depth]), parts[depth]
    own = ".".join(filter(None, (module, name)))
    status = api.status(own)
    if status.kind == "unknown":
        near = api.suggestion(module, name) or did_you_mean(name, sorted(api.modules()))
        return own, Status("unknown", f"no such name is known{near}")
    if status.kind == "supported" and len(parts) == depth + 2:
        return path, _member(own, parts[-1])
    return own, status


def _member(owner: str, name: str) -> Status:
    """What a method or attribute of a class is; of another object, what the object is."""
    target, row = api.find(owner), _row(owner)
    noted = api.noted(f"{row.path if row else owner}.{name}", name)
    if noted is not None:
        return noted
    if row is None or not isinstance(target, type) or hasattr(target, name):
        return api.SUPPORTED
    if hasattr(target, "__getattr__") and f"{row.path}.{name}" in api.rows():
        return api.SUPPORTED
    bases = [each for base in target.__mro__ for each in _exported("", base.__name__)]
    attributes = [
        each
        for base in {row.path: 0, **dict.fromkeys(bases)}
        for each in (*api.rows()[base].attributes, *api.rows()[base].arguments)
    ]
    release = current_session().release
    if any(each.name == name and release in each.releases for each in attributes):
        return api.SUPPORTED
    names = [each.name for each in attributes] + [each for each in dir(target) if each[0] != "_"]
    return Status("unknown", f"no such attribute is known{did_you_mean(name, names)}")


# -- the references of a script


def _bindings(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(local name, dotted path) of every absolute import; `*` stands for itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                path = each.name if each.asname else each.name.partition(".")[0]
                yield each.asname or path, path
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def references(tree: ast.Module) -> list[Reference]:
    """Every reference to the API in a script."""
    scan = _Scan(dict(_bindings(tree)))
    scan.find_types(tree)
    scan.visit(tree)
    return list(dict.fromkeys(scan.references))


class _Scan(ast.NodeVisitor):
    """Collects references by `bound`, the paths of local names, and `types`, those of variables."""

    def __init__(self, bound: dict[str, str]) -> None:
        api_paths = {name: path for name, path in bound.items() if _is_api(path)}
        self.bound = {
            n: path[len(ROOT) + 1 :] for n, path in api_paths.items() if path[-2:] != ".*"
        }
        self.stars = [p[len(ROOT) + 1 : -2] for p in api_paths.values() if p[-2:] == ".*"]
        self.types: dict[str, str] = {}
        self.references: list[Reference] = []

    def find_types(self, tree: ast.AST) -> None:
        """Learn the classes of variables from assignments and annotations.

        What one assignment tells, the next may need: three rounds settle those of real scripts.
        """
        for _ in range(3):
            before, learned = self.types, dict[str, str]()
            self._learn_from(tree, learned)
            self.types = learned
            if learned == before:
                return

    def _learn_from(self, tree: ast.AST, learned: dict[str, str]) -> None:
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[target], value=value):
                    _learn(learned, target, self._type(value))
                case ast.AnnAssign(target=target, annotation=annotation):
                    _learn(learned, target, self._class(annotation))
                case ast.arg(arg=name, annotation=ast.expr() as annotation):
                    _learn(learned, ast.Name(name), self._class(annotation))
                case _:
                    pass

    def _class(self, node: ast.expr) -> str | None:
        path = self._path(node)
        row = None if path is None else _row(path)
        return row.path if row is not None and row.path.rpartition(".")[2][:1].isupper() else None

    def _type(self, value: ast.expr) -> str | None:
        """The class of an expression, where it is one of the API."""
        if isinstance(value, ast.Attribute):
            owner = self._type_of(value.value)
            return _RETURNS.get(f"{owner}.{value.attr}") if owner else None
        if not isinstance(value, ast.Call):
            return None
        own = self._class(value.func)
        if own is not None:
            return own
        if isinstance(value.func, ast.Attribute):
            owner = self._class(value.func.value)
            if owner is not None and value.func.attr.startswith("from_"):
                return owner
            inner = self._type_of(value.func.value)
            if inner:
                return _RETURNS.get(f"{inner}.{value.func.attr}")
        path = self._path(value.func)
        return None if path is None else _RETURNS.get(path)

    def _type_of(self, node: ast.expr) -> str | None:
        return self.types.get(ast.unparse(node)) or self._type(node)

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            if _is_api(each.name):
                self._add(node, each.name[len(ROOT) + 1 :])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not _is_api(node.module or ""):
            return
        module = str(node.module)[len(ROOT) + 1 :]
        for each in node.names:
            star = each.name == "*"
            self._add(node, module if star else f"{module}.{each.name}".lstrip("."))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (path := self._path(node)) is not None:
            self._add(node, path)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is not None:
            self._add(node, path)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        path = self._path(node.func)
        kind = self._type_of(node.func) if path is None else None
        if kind and f"{kind}.forward" in api.rows():  # a layer is called
            path = f"{kind}.forward"
        if path is None:
            self.generic_visit(node)
            if isinstance(node.func, ast.Attribute):
                line, name = node.func.end_lineno or node.lineno, f".{node.func.attr}"
                self.references.append(Reference(line, name, True, None, tuple(node.keywords)))
            return
        if isinstance(node.func, (ast.Attribute, ast.Call)):
            self.visit(node.func.value if isinstance(node.func, ast.Attribute) else node.func)
        hidden = any(isinstance(each, ast.Starred) for each in node.args)
        count = None if hidden else len(node.args)
        line = node.func.end_lineno or node.lineno
        self.references.append(Reference(line, path, True, count, tuple(node.keywords)))
        for each in (*node.args, *node.keywords):
            self.visit(each)

    def _path(self, node: ast.expr) -> str | None:
        """The path that a name, or attributes of one, stand for; None for other expressions."""
        if isinstance(node, ast.Name):
            if node.id in self.bound:
                return self.bound[node.id]
            stars = (star for star in self.stars if f"{star}.{node.id}" in api.rows())
            return next((f"{star}.{node.id}" for star in stars), None)
        if not isinstance(node, ast.Attribute):
            return None
        base = self._type_of(node.value) or self._path(node.value)
        return None if base is None else f"{base}.{node.attr}".lstrip(".")

    def _add(self, node: ast.AST, path: str) -> None:
        self.references.append(Reference(getattr(node, "lineno", 1), path))


def _learn(learned: dict[str, str], target: ast.expr, kind: str | None) -> None:
    """Keep the class of a variable; "" where it has several, or one that is not known."""
    name = ast.unparse(target)
    if kind is None or learned.setdefault(name, kind) != kind:
        learned[name] = ""


def _is_api(path: str) -> bool:
    return path == ROOT or path.startswith(f"{ROOT}.")


def as_rows(report: Report) -> list[tuple[Use, list[int]]]:
    """Equal uses together, with their lines; those that need work first."""
    grouped: dict[Use, list[int]] = {}
    for use in report.uses:
        grouped.setdefault(replace(use, line=0), []).append(use.line)
    order = ("refused", "unknown", "only when off", "without effect", "supported")
    return sorted(grouped.items(), key=lambda row: (order.index(row[0].status), row[1][0]))
