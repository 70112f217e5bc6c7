"""A position in the token list, and the errors that point at it."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import NoReturn

from ..dims import LARGEST
from ..errors import TextError
from ..strings import unquote
from .tokens import describe, offset_of, tokenize

_WORD = re.compile(r"[A-Za-z_]\w*")
VALUE = re.compile(r"%(?:[A-Za-z_]\w*(?:\.\d+)?|\d+)")
_SYMBOL = re.compile(r"@\w[\w.]*")
_LONGEST_NUMBER = 20  # characters; numbers have 64 bits


class Cursor:
    """Walks through the tokens; `token` is the current one, empty at the end."""

    def __init__(self, text: str, filename: str) -> None:
        self.text, self.filename = text, filename
        self.tokens = tokenize(text)
        self.index = 0
        self.token = self.tokens[0]

    @property
    def shown(self) -> str:
        """The current token as it reads in a message."""
        return describe(self.token)

    @property
    def ahead(self) -> str:
        """The token after the current one."""
        return self.tokens[self.index + 1] if self.token else ""

    def advance(self) -> None:
        """Go to the next token; never called at the end."""
        self.index += 1
        self.token = self.tokens[self.index]

    def jump(self, index: int) -> None:
        """Go to the token at `index`."""
        self.index = index
        self.token = self.tokens[index]

    def fail(
        self, message: str, back: int = 0, index: int | None = None, inside: int = 0
    ) -> NoReturn:
        """Raise at the current token, `back` tokens earlier, or at `index`."""
        at = self.index - back if index is None else index
        offset = offset_of(self.text, at) + inside
        raise TextError(message, self.filename, self.text, min(offset, len(self.text)))

    def accept(self, token: str) -> bool:
        """Step over `token` if it is the current one."""
        if self.token != token or not token:
            return False
        self.index += 1
        self.token = self.tokens[self.index]
        return True

    def expect(self, token: str) -> None:
        """Step over `token`, or fail."""
        if not self.accept(token):
            self.fail(f"expected {token!r}, found {self.shown}")

    def separator(self, close: str) -> None:
        """Step over a comma unless the list ends here."""
        if self.token != close:
            self.expect(",")

    def word(self) -> str:
        """A plain name."""
        token = self.token
        if not _WORD.fullmatch(token):
            self.fail(f"expected a name, found {self.shown}")
        self.advance()
        return token

    def value(self) -> str:
        """The name of a `%value`, without the sign."""
        token = self.token
        if not VALUE.fullmatch(token):
            self.fail(f"expected a value such as %x, found {self.shown}")
        self.advance()
        return token[1:]

    def symbol(self) -> str:
        """The name of an `@symbol`, without the sign."""
        token = self.token
        if not _SYMBOL.fullmatch(token):
            self.fail(f"expected a symbol such as @main, found {self.shown}")
        self.advance()
        return token[1:]

    def new_symbol(self, known: Container[str], kind: str) -> str:
        """A symbol that is not in `known` yet."""
        name = self.symbol()
        if name in known:
            self.fail(f"there are two definitions of {kind} @{name}", back=1)
        return name

    def integer(self) -> int:
        """An integer of 64 bits."""
        token = self.token
        if not token.lstrip("-").isdecimal() or not token.isascii():
            self.fail(f"expected an integer, found {self.shown}")
        # the length first: Python takes long to read a number of many digits
        if len(token) > _LONGEST_NUMBER or not -LARGEST - 1 <= int(token) <= LARGEST:
            self.fail(f"the number {self.shown} is too large")
        self.advance()
        return int(token)

    def string(self) -> str:
        """The text of a string literal."""
        token = self.token
        if token[:1] != '"':
            self.fail(f"expected a string, found {self.shown}")
        try:
            text = unquote(token)
        except ValueError:
            self.fail(f"cannot read the string {self.shown}")
        self.advance()
        return text
