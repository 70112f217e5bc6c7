"""Source locations of operations: a line of the user's script, and the module scope."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from types import CodeType
from typing import Any

from .ir.string_literals import quote

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# The three sibling folders are reached through links, so their frames carry one of two paths.
_OWN = tuple(
    {
        path + os.sep
        for name in ("", "passes", "backends", "frontends")
        for path in (os.path.join(_PACKAGE, name), os.path.realpath(os.path.join(_PACKAGE, name)))
        if os.path.isdir(path)
    }
)
# Models are scripts inside irc: their own lines are better locations than the line that loads them.
_MODELS = tuple(os.path.join(own, "models", "") for own in _OWN if "frontends" in own)
_scope: ContextVar[str] = ContextVar("irc_scope", default="")


class Loc:
    """A file, a line counted from 1, and a module path such as `layers.0.mlp`.

    `origin` is the code object and the instruction of a trace; it is neither printed nor compared.
    """

    __slots__ = ("file", "line", "origin", "scope")

    def __init__(
        self, file: str, line: int, scope: str = "", origin: tuple[CodeType, int] | None = None
    ) -> None:
        self.file, self.line, self.scope, self.origin = file, line, scope, origin

    def where(self) -> str:
        """`models/llama.py:41 in layers.0.self_attn`; without the folder where it is unknown."""
        file = self.file if self.origin is None else shown_path(self.origin[0].co_filename)
        return f"{file}:{self.line}" + (f" in {self.scope}" if self.scope else "")

    def excerpt(self) -> str:
        """The line of Python with a mark under the expression; empty where it is unknown."""
        if self.origin is None:
            return ""
        code, instruction = self.origin
        linecache.checkcache(code.co_filename)
        line = linecache.getline(code.co_filename, self.line).rstrip()
        if not line:
            return ""
        first, last, begin, end = next(islice(code.co_positions(), instruction // 2, None))
        text = line.lstrip()
        if begin is None or end is None:
            return text
        end = end if first == last else len(line.encode())
        before, marked = _characters(line, 0, begin), _characters(line, begin, end)
        return f"{text}\n{' ' * (before - len(line) + len(text))}{'^' * marked}"

    def __repr__(self) -> str:
        scope = f" {quote(self.scope)}" if self.scope else ""
        return f"loc({quote(self.file)}:{self.line}{scope})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loc) and (self.file, self.line, self.scope) == (
            other.file,
            other.line,
            other.scope,
        )

    def __hash__(self) -> int:
        return hash((self.file, self.line, self.scope))


def shown_path(file: str) -> str:
    """A path that an editor opens: relative if the file is below the current folder."""
    return os.path.abspath(file).removeprefix(os.path.join(os.getcwd(), ""))


def _characters(line: str, begin: int, end: int) -> int:
    """The number of characters in bytes `begin` to `end`; code positions count bytes."""
    return len(line.encode()[begin:end].decode(errors="replace"))


@contextmanager
def scope(name: str) -> Generator[None]:
    """Locations in the block have `name` appended to their module path."""
    outer = _scope.get()
    token = _scope.set(f"{outer}.{name}" if outer and name else outer or name)
    try:
        yield
    finally:
        _scope.reset(token)


def current_scope() -> str:
    """The module path at this point of a trace."""
    return _scope.get()


def here() -> Loc:
    """The location of the nearest frame outside irc or in its models, else the outermost one."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and (
        is_own(frame.f_code.co_filename) or _is_generated(frame.f_code, frame.f_globals)
    ):
        frame = frame.f_back
    return _loc(frame.f_code, frame.f_lineno, frame.f_lasti, _scope.get())


def _is_generated(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether code is the constructor of a dataclass of irc, which is in no file."""
    return code.co_filename == "<string>" and str(names.get("__name__")).startswith("irc.")


def raised_at(error: BaseException, counts: Callable[[str], bool]) -> Loc | None:
    """The innermost line of a file that `counts` at which an exception was raised."""
    loc, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if counts(code.co_filename):
            loc = _loc(code, trace.tb_lineno, trace.tb_lasti)
        trace = trace.tb_next
    return loc


def _loc(code: CodeType, line: int, instruction: int, scope: str = "") -> Loc:
    return Loc(os.path.basename(code.co_filename), line, scope, (code, instruction))


def is_own(file: str) -> bool:
    """Whether a file of code is irc's, but none of its models."""
    return file.startswith(_OWN) and not file.startswith(_MODELS)
