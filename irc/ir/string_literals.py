"""String literals of the language: JSON's escapes, always on one line."""

from __future__ import annotations

import json
import re

WORD = re.compile(r"[A-Za-z_]\w*")


_as_it_is = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes an encoder each time


def quote(text: str) -> str:
    """`text` as a literal; one that cannot be printed as it is has escapes for all but ASCII."""
    return _as_it_is(text) if text.isprintable() else json.dumps(text)


def shown_name(name: str) -> str:
    """The name of an argument or a result in text: a literal where it is no word."""
    return name if WORD.fullmatch(name) else quote(name)


def hint_shown(name: str) -> str:
    """The name of another value in text, which it may have from an argument or a result: a word."""
    if not name or WORD.fullmatch(name):
        return name
    plain = re.sub(r"\W", "_", name)
    return plain if WORD.fullmatch(plain) else f"_{plain}"


def unquote(literal: str) -> str:
    """The text of a literal, quotes included; a ValueError where it cannot be read."""
    if "\\" not in literal and literal.isprintable() and len(literal) > 1:
        return literal[1:-1]
    text = json.loads(literal)
    if not isinstance(text, str):
        raise ValueError(f"{literal} is not a string literal")
    text.encode()  # a ValueError for surrogates, which no file of text can hold
    return text
