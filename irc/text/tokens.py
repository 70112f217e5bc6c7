"""The tokens of the text form. A type is one token, because a module has few distinct types."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""\s*(
      [%@]\w[\w.]*                                        # %value, @symbol
    | [=,:{}()]
    | [A-Za-z_]\w*(?:\[[^\]"\n]*\](?:\{[^}"\n]*\})?)?   # a word, or a type: bf16[B, S@tp]{sum tp}
    | -?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf\b)             # a number
    | "(?:[^"\\\n]|\\.)*"                                # a string
    | ->
    | //[^\n]*                                           # a comment, dropped
    | \S )""",
    re.VERBOSE,
)


def tokenize(text: str) -> list[str]:
    """The tokens in order, followed by empty ones that mark the end."""
    tokens = _TOKEN.findall(text)
    if "//" in text:
        tokens = [token for token in tokens if token[:2] != "//"]
    tokens += ["", ""]
    return tokens


def offset_of(text: str, index: int) -> int:
    """Where the token at `index` starts. Computed only for error messages."""
    count = 0
    for match in _TOKEN.finditer(text):
        if match[1][:2] == "//":
            continue
        if count == index:
            return match.start(1)
        count += 1
    return len(text.rstrip())


def describe(token: str) -> str:
    """A token as it reads in a message."""
    return (
        repr(token if len(token) <= 60 else token[:57] + "...") if token else "the end of the text"
    )
