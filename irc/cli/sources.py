"""Reads the modules that commands work on: a file, an artifact folder, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from ..core import Module
from ..errors import Error
from .console import warn

STDIN = "-"


def read_module(place: str) -> Module:
    """The module in a file, in an artifact folder, or on standard input (`-`), verified."""
    from ..driver.sources import read_module as read_place
    from ..verify import verify

    module = _from_stdin() if place == STDIN else read_place(Path(place))
    verify(module)
    return module


def _from_stdin() -> Module:
    from ..text import parse_module

    if sys.stdin.isatty():
        warn("irc: reading a module from the keyboard; ctrl-D ends it")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Error(f"<stdin> is no text in UTF-8 (byte {error.start} is not)") from None
    return parse_module(text, "<stdin>")
