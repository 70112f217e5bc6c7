"""`Cursor`: the tokens of a text, the position of a parser in them, and errors at it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from itertools import islice
from typing import NoReturn

from ..errors import TextError
from ..ir.dims import LARGEST
from ..ir.string_literals import WORD, unquote

# A type is one token: a module has few distinct types.
TOKEN = re.compile(
    r"""\s*(
      [%@]\w[\w.]*                                        # %value, @symbol
    | %"(?:[^"\\\n]|\\.)*+"                              # an argument whose name is no word
    | [=,:{}()]
    # a word, or a type: bf16[B]{sum tp}, bf16[4] of bf16[8@tp]
    | [A-Za-z_]\w*+(?:\[[^][\n"]*+\](?:\{[^}{\n"]*+\})?
        (?:\ +of\ +[A-Za-z_]\w*+\[[^][\n"]*+\](?:\{[^}{\n"]*+\})?)*+)?
    | -?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf\b)             # a number
    | "(?:[^"\\\n]|\\.)*+"?                              # a string, also one without its end
    | ->
    | //[^\n]*                                           # a comment, removed
    | \S )""",
    re.VERBOSE,
)
VALUE = re.compile(r"%(?:[A-Za-z_]\w*(?:\.\d+)?|\d+)")
_SYMBOL = re.compile(r"@\w[\w.]*")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"')
_LONGEST_NUMBER = 20  # characters; numbers have 64 bits


def tokenize(text: str, pattern: re.Pattern[str] = TOKEN) -> list[str]:
    """The tokens in order without comments, then two empty tokens that mark the end."""
    tokens = pattern.findall(text.rstrip())  # time grows with the square of blanks without a token
    if "//" in text:
        tokens = [token for token in tokens if token[:2] != "//"]
    tokens += ["", ""]
    return tokens


class Cursor:
    """The tokens of a text; `token` is the current one, empty at the end."""

    def __init__(self, text: str, filename: str, pattern: re.Pattern[str] = TOKEN) -> None:
        self.text, self.filename, self.pattern = text, filename, pattern
        self.tokens = tokenize(text, pattern)
        self.index = 0
        self.token = self.tokens[0]

    @property
    def shown(self) -> str:
        """The current token in a message."""
        token = self.token if len(self.token) <= 60 else self.token[:57] + "..."
        return repr(token) if token else "the end of the text"

    @property
    def ahead(self) -> str:
        """The token after the current one."""
        return self.tokens[self.index + 1] if self.token else ""

    def advance(self) -> None:
        """Go to the next token; not at the end."""
        self.index += 1
        self.token = self.tokens[self.index]

    def jump(self, index: int) -> None:
        """Go to the token at `index`."""
        self.index = index
        self.token = self.tokens[index]

    def fail(self, message: str, back: int = 0, index: int | None = None) -> NoReturn:
        """Raise at the current token, `back` tokens earlier, or at `index`."""
        at, text = self.index - back if index is None else index, self.text.rstrip()
        starts = (m.start(1) for m in self.pattern.finditer(text) if m[1][:2] != "//")
        offset = next(islice(starts, at, None), len(text))
        raise TextError(message, self.filename, self.text, offset)

    def accept(self, token: str) -> bool:
        """Advance past `token` if it is the current one."""
        if self.token != token or not token:
            return False
        self.index += 1
        self.token = self.tokens[self.index]
        return True

    def expect(self, token: str) -> None:
        """Advance past `token`, or fail."""
        if not self.accept(token):
            self.fail(f"expected {token!r}, found {self.shown}")

    def items(self, begin: str, end: str) -> Iterator[None]:
        """Yield at each item of a list with commas, and advance past the list."""
        self.expect(begin)
        while not self.accept(end):
            yield
            if self.token != end and not self.accept(","):
                self.fail(f"expected ',' or {end!r}, found {self.shown}")

    def _matching(self, pattern: re.Pattern[str], what: str) -> str:
        """The current token, which must match `pattern`."""
        token = self.token
        if not pattern.fullmatch(token):
            self.fail(f"expected {what}, found {self.shown}")
        self.advance()
        return token

    def word(self) -> str:
        """A name."""
        return self._matching(WORD, "a name")

    def value(self) -> str:
        """The name of a `%value`, without the sign."""
        return self._matching(VALUE, "a value such as %x")[1:]

    def argument(self) -> str:
        """The name of an argument `%x` or `%"x:0"`, without the sign."""
        return self.string("%") if self.token[:2] == '%"' else self.value()

    def result(self) -> str:
        """The name of a result, `y` or `"y:0"`."""
        return self.string() if self.token[:1] == '"' else self.word()

    def symbol(self) -> str:
        """The name of an `@symbol`, without the sign."""
        return self._matching(_SYMBOL, "a symbol such as @main")[1:]

    def new_symbol(self, defined: Container[str], kind: str) -> str:
        """A symbol that is not in `known` yet."""
        name = self.symbol()
        if name in defined:
            self.fail(f"there are two definitions of {kind} @{name}", back=1)
        return name

    def integer(self, most: int = LARGEST) -> int:
        """An integer of 64 bits, up to `most`."""
        token = self.token
        if not token.lstrip("-").isdecimal() or not token.isascii():
            self.fail(f"expected an integer, found {self.shown}")
        # the length first: parsing a number of many digits is slow
        if len(token) > _LONGEST_NUMBER or not -LARGEST - 1 <= int(token) <= most:
            self.fail(f"the number {self.shown} is too large")
        self.advance()
        return int(token)

    def string(self, sign: str = "") -> str:
        """The text of a string literal, which a sign may precede."""
        token = self.token.removeprefix(sign)
        if token[:1] != '"':
            self.fail(f"expected a string, found {self.shown}")
        if _STRING.fullmatch(token) is None:
            self.fail(f"the string {self.shown} does not end in its line")
        try:
            text = unquote(token)
        except ValueError:
            self.fail(f"cannot read the string {self.shown}")
        self.advance()
        return text
