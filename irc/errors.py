"""Errors about the user's program: a sentence that says what to do, and the place to do it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core import Op
    from .source import Loc


class Error(Exception):
    """Something in the user's script, text, options or files has to change.

    `op` is the operation to point at, `loc` the place in the user's source; where only `op` is
    given its own location is used. The text is put together when it is read, never before, so
    that an error which is caught and dropped costs nothing.
    """

    def __init__(self, message: str, op: Op | None = None, loc: Loc | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.op = op
        self.loc = loc

    def at(self, op: Op | None = None, loc: Loc | None = None) -> Error:
        """This error, pointing at `op` and `loc` where it did not point anywhere yet."""
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
    """Text that cannot be read: the message starts with `file:line:col` and ends with a caret."""

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
    """The part of a line around a column, so that a line of a megabyte stays readable."""
    if len(source) <= width:
        return 0, source
    begin = max(0, column - width // 2)
    return begin, source[begin : begin + width]


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """`; did you mean 'linear'?`, or nothing where no known name is near.

    `otherwise` is what to do where none of the known names is meant.
    """
    near = difflib.get_close_matches(word[:64], list(known), 1)
    if not near:
        return f"; {otherwise}" if otherwise else ""
    return f"; did you mean {near[0]!r}?" + (f" Otherwise {otherwise}" if otherwise else "")
