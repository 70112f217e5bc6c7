"""Errors about the user's input: a sentence that says what to do, and where."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ir.core import Op
    from .source import Loc

_LONG_WORD, _LONG_LINE = re.compile(r"\S{300,}+"), re.compile(r".{4000,}+")
# What a terminal would obey and not show: control characters but line feed and tab, and marks that
# change the direction of text.
_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


_SIMILAR = 0.77  # of letters in common, from which a word counts as mistyped


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
        return printable(f"{where}{self.message}{shown}{notes}")


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
        caret = " " * len(printable(shown[: self.column - 1 - from_])) + "^"
        place = f"{self.filename}:{self.line}:{self.column}"
        return printable(f"{place}: error: {self.message}\n  {shown}\n  {caret}")


def printable(text: str) -> str:
    """`text` that may quote files of others: what a terminal would obey is escaped, and the middle
    of very long words and lines is left out, since names and lists may have megabytes."""
    text = _LONG_WORD.sub(lambda match: f"{match[0][:150]}...{match[0][-100:]}", text)
    text = _LONG_LINE.sub(lambda match: f"{match[0][:3000]} ... {match[0][-500:]}", text)
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _window(source: str, column: int, width: int = 120) -> tuple[int, str]:
    """(Start, text) of the part of a line around a column; lines may have a megabyte."""
    if len(source) <= width:
        return 0, source
    begin = max(0, column - width // 2)
    return begin, source[begin : begin + width]


def installs(extra: str, option: str = "") -> str:
    """The command that installs an extra of irc, for messages."""
    return f"pip install {option}'.[{extra}]' in the checkout of irc"


def did_you_mean(word: str, words: Iterable[str], otherwise: str = "") -> str:
    """`; did you mean 'linear'?`, empty where no known name is similar.

    Similar are a slip of the keyboard, a beginning, and some of the words of a name.
    `otherwise` is the advice for a user who means none of the known names.
    """
    names = {name.lower().lstrip("-"): name for name in words}
    typed = word[:64].lower().lstrip("-")
    slips = [typed] if typed in names else [name for name in names if _is_slip(typed, name)]
    near = difflib.get_close_matches(typed, slips or names, 1, 0 if slips else _SIMILAR)
    near = near or [name for name in names if len(typed) > 2 and _abbreviates(typed, name)]
    if not near:
        return f"; {otherwise}" if otherwise else ""
    return f"; did you mean {names[near[0]]!r}?" + (f" Otherwise {otherwise}" if otherwise else "")


def _is_slip(typed: str, name: str) -> bool:
    """Whether one letter is wrong, missing or too many, or two have changed places."""
    if len(typed) < 2 and len(name) < 2:
        return False
    at = next((i for i, (a, b) in enumerate(zip(typed, name, strict=False)) if a != b), None)
    at = min(len(typed), len(name)) if at is None else at
    a, b = typed[at:], name[at:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2], a[2:]) == (b[1::-1], b[2:])


def _abbreviates(typed: str, name: str) -> bool:
    """Whether `typed` begins a name, or consists of words of it; `build` is not `no-build`."""
    own, all = (set(re.split(r"[-_.]", text)) for text in (typed, name))
    return name.startswith(typed) or (own <= all and "no" not in all - own)
