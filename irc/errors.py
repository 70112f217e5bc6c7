"""Errors about the user's input: a sentence that says what to do, and where."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ir.core import Op
    from .source import Loc


class Error(Exception):
    """Something in the user's script, text, options or files has to change.

    `op` is the operation that the message shows, `loc` the place in the user's source, by default
    the operation's. The text is built when it is read, so that a caught error costs little.
    """

    def __init__(self, message: str, op: Op | None = None, loc: Loc | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.op = op
        self.loc = loc

    def at(self, op: Op | None = None, loc: Loc | None = None) -> Error:
        """This error, with `op` and `loc` where it has none yet."""
        self.op = self.op or op
        self.loc = self.loc or loc
        return self

    def __str__(self) -> str:
        loc = self.loc or (self.op.loc if self.op is not None else None)
        where = f"{loc.where()}: " if loc is not None else ""
        excerpts = [loc.excerpt() if loc is not None else "", str(self.op or "")]
        shown = "".join(f"\n{indent(text, '    ')}" for text in excerpts if text)
        notes = "".join(f"\n  {note}" for note in getattr(self, "__notes__", ()))
        return f"{where}{self.message}{shown}{notes}"


class TextError(Error):
    """Text that cannot be parsed; the message starts with `file:line:col` and ends with a caret."""

    def __init__(self, message: str, filename: str, text: str, offset: int) -> None:
        super().__init__(message)
        self.filename, self.text, self.offset = filename, text, offset

    @property
    def line(self) -> int:
        """The line, counted from 1."""
        return self.text.count("\n", 0, self.offset) + 1

    @property
    def column(self) -> int:
        """The column, counted from 1."""
        return self.offset - self.text.rfind("\n", 0, self.offset)

    def __str__(self) -> str:
        begin = self.text.rfind("\n", 0, self.offset) + 1
        end = self.text.find("\n", begin)
        source = self.text[begin : end if end >= 0 else len(self.text)].replace("\t", " ")
        from_, shown = _window(source, self.column - 1)
        caret = " " * (self.column - 1 - from_) + "^"
        return (
            f"{self.filename}:{self.line}:{self.column}: error: {self.message}"
            f"\n  {shown}\n  {caret}"
        )


def _window(source: str, column: int, width: int = 120) -> tuple[int, str]:
    """(Start, text) of the part of a line around a column; lines may have a megabyte."""
    if len(source) <= width:
        return 0, source
    begin = max(0, column - width // 2)
    return begin, source[begin : begin + width]


def is_debugging() -> bool:
    """Whether IRC_DEBUG asks for tracebacks."""
    return os.environ.get("IRC_DEBUG", "") not in ("", "0")


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """`; did you mean 'linear'?`, empty where no known name is similar.

    `otherwise` is the advice for a user who means none of the known names.
    """
    near = difflib.get_close_matches(word[:64], list(known), 1)
    if not near:
        return f"; {otherwise}" if otherwise else ""
    return f"; did you mean {near[0]!r}?" + (f" Otherwise {otherwise}" if otherwise else "")
