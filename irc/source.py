"""Where an operation came from: the line of the user's script and the module scope around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from .strings import quote

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
# Models are scripts that come with irc: their own lines say more than the line that loads them.
_MODELS = tuple(os.path.join(own, "models", "") for own in _OWN if "frontends" in own)
_scope: ContextVar[str] = ContextVar("irc_scope", default="")


class Loc:
    """A file, a line counted from 1, and a module path such as `layers.0.mlp`."""

    __slots__ = ("file", "line", "scope")

    def __init__(self, file: str, line: int, scope: str = "") -> None:
        self.file, self.line, self.scope = file, line, scope

    def where(self) -> str:
        """`llama.py:41 in layers.0.self_attn`."""
        return f"{self.file}:{self.line}" + (f" in {self.scope}" if self.scope else "")

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


@contextmanager
def scope(name: str) -> Generator[None]:
    """Everything located inside gets `name` appended to its module path."""
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
    """The nearest frame outside irc or in its models; the outermost frame where there is none."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and _inside(frame.f_code.co_filename):
        frame = frame.f_back
    return Loc(os.path.basename(frame.f_code.co_filename), frame.f_lineno, _scope.get())


def _inside(file: str) -> bool:
    return file.startswith(_OWN) and not file.startswith(_MODELS)
