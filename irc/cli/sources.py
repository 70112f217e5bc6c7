"""Reads the modules that commands work on: a file, an artifact folder, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from ..artifact import MODULE, is_artifact
from ..core import Module
from ..errors import Error
from ..text import parse_module
from ..verify import verify
from .console import warn

STDIN = "-"


def read_module(place: str) -> Module:
    """The module in a file, in an artifact folder, or on standard input (`-`)."""
    text, name = read_text(place)
    module = parse_module(text, name)
    verify(module)
    return module


def read_text(place: str) -> tuple[str, str]:
    """(the text of a module, what to call its source in messages)."""
    if place == STDIN:
        if sys.stdin.isatty():
            warn("irc: reading a module from the keyboard; ctrl-D ends it")
        return _decoded(sys.stdin.buffer.read(), "<stdin>"), "<stdin>"
    path = module_file(Path(place))
    try:
        return _decoded(path.read_bytes(), str(path)), str(path)
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror}") from None


def module_file(path: Path) -> Path:
    """The file of a module: `path` itself, or module.irc where it is an artifact folder."""
    if not path.is_dir():
        return path
    if is_artifact(path):
        return path / MODULE
    raise Error(
        f"{path} is no artifact; if it is a checkpoint, compile it first: irc compile {path} -o DIR"
    )


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Error(f"{name} is no text in UTF-8 (byte {error.start} is not)") from None
