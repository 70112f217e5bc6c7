"""`lint_script`: every name of TensorRT-LLM that a script uses, and what it is in irc.

The script is read, not run, so that scripts whose packages or weights are missing can be checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...errors import Error, TextError, did_you_mean
from .names import ROOT, alternative, keywords, look_up, methods, modules, suggestion, table

Status = Literal["supported", "without effect", "unsupported", "unknown"]


@dataclass(frozen=True)
class Use:
    """One use of a name: line (from 1), the name as a path, its status, and why."""

    line: int
    name: str
    status: Status
    why: str = ""


@dataclass(frozen=True)
class Report:
    """The uses in a script in the order of its lines."""

    uses: list[Use]

    @property
    def score(self) -> float:
        """The share of the uses that irc takes, from 0 to 1; 1 where there is none."""
        taken = sum(use.status in ("supported", "without effect") for use in self.uses)
        return taken / len(self.uses) if self.uses else 1.0


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


def lint_script(path: str | Path) -> Report:
    """What every import, name, call and keyword argument of the API in a script is."""
    tree = parse_script(path)
    scan = _Scan(dict(_bindings(tree)))
    scan.visit(tree)
    uses = dict.fromkeys(scan.uses)
    return Report(sorted(uses, key=lambda use: use.line))


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


class _Scan(ast.NodeVisitor):
    """Collects the uses in a tree; `bound` are the paths of local names."""

    def __init__(self, bound: dict[str, str]) -> None:
        self.bound = {name: path for name, path in bound.items() if _is_api(path)}
        self.stars = [path.removesuffix(".*") for path in self.bound.values() if path[-2:] == ".*"]
        self.uses: list[Use] = []

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            if _is_api(each.name):
                self._add(node, each.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not _is_api(node.module or ""):
            return
        for each in node.names:
            self._add(node, f"{node.module}.{each.name}" if each.name != "*" else str(node.module))

    def visit_Name(self, node: ast.Name) -> None:
        if (path := self._path(node)) and isinstance(node.ctx, ast.Load):
            self._add(node, path)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is None:
            self.generic_visit(node)
        else:
            self._add(node, path)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        path, function = self._path(node.func), node.func
        method = methods().get(function.attr) if isinstance(function, ast.Attribute) else None
        if path is None and method is not None and isinstance(function, ast.Attribute):
            status, why = method
            self.uses.append(
                Use(function.end_lineno or node.lineno, f".{function.attr}", status, why)
            )
        if path is not None or method is not None:
            for each in node.keywords:
                why = keywords().get(each.arg or "")
                if why is not None:
                    name = f"{each.arg}="
                    self.uses.append(Use(each.value.lineno, name, "without effect", why))

    def _path(self, node: ast.AST) -> str | None:
        """The path that a name, or attributes of one, stand for; None for other expressions."""
        if isinstance(node, ast.Name):
            path = self.bound.get(node.id)
            stars = (star for star in self.stars if _status(f"{star}.{node.id}")[0] != "unknown")
            return path or next((f"{star}.{node.id}" for star in stars), None)
        if isinstance(node, ast.Attribute):
            base = self._path(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None

    def _add(self, node: ast.AST, path: str) -> None:
        status, why, shown = _status(path)
        self.uses.append(Use(getattr(node, "lineno", 1), shown, status, why))


def _is_api(path: str) -> bool:
    return path == ROOT or path.startswith(f"{ROOT}.")


def _status(path: str) -> tuple[Status, str, str]:
    """(status, why, the part of the path that is a name); attributes of a name share its status."""
    parts = path.split(".")[1:]
    depth = 0
    while depth < len(parts) and _is_module(*parts[: depth + 1]):
        depth += 1
    module = ".".join(parts[:depth])
    if depth == len(parts):
        why = (alternative(module) or "") if module else ""
        return ("unsupported" if why else "supported"), why, path
    name = parts[depth]
    shown = ".".join(filter(None, (ROOT, module, name)))
    found = look_up(module, name)
    if found is not None:
        return found.kind, found.why, shown
    near = suggestion(module, name) or did_you_mean(name, modules())
    return "unknown", f"no such name is known{near}", shown


def _is_module(*parts: str) -> bool:
    """Whether a path is a module, or below one that is unsupported, and no name of the table."""
    path = ".".join(parts)
    is_name = (".".join(parts[:-1]), parts[-1]) in table() and path not in modules()
    return not is_name and alternative(path) is not None


def as_rows(report: Report) -> list[tuple[Use, list[int]]]:
    """Equal uses together, with their lines; those that need work first."""
    grouped: dict[Use, list[int]] = {}
    for use in report.uses:
        grouped.setdefault(replace(use, line=0), []).append(use.line)
    order = ("unsupported", "unknown", "without effect", "supported")
    return sorted(grouped.items(), key=lambda row: (order.index(row[0].status), row[1][0]))
