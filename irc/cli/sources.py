"""Reads the modules that commands work on: a file, a folder, a script, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..core import Module
from ..errors import Error
from .console import warn

STDIN = "-"


def read_module(place: str, **options: Any) -> Module:
    """The module in a file, in an artifact folder, or on standard input (`-`), verified.

    A script is run, with the `options` of `script_options`; its weights may be unbound.
    """
    from ..driver.sources import find_source, is_script
    from ..driver.sources import read_module as read_place
    from ..verify import verify

    if is_script(place):
        module = find_source(place, **options, bound=False).module
    elif options:
        name = next(iter(options)).replace("settings", "set")
        raise Error(f"{place} is no script, so --{name} has no effect; leave it out")
    else:
        module = _from_stdin() if place == STDIN else read_place(Path(place))
    verify(module)
    return module


def weights_folder(place: str) -> Path:
    """Where the relative paths of weight files start in what `read_module` gives."""
    from ..driver.sources import is_onnx, is_script

    path = Path(place)
    if place == STDIN or is_script(place) or is_onnx(path):
        return Path()
    return path if path.is_dir() else path.parent


def _from_stdin() -> Module:
    from ..text import parse_module

    if sys.stdin.isatty():
        warn("irc: reading a module from the keyboard; ctrl-D ends it")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Error(f"<stdin> is no text in UTF-8 (byte {error.start} is not)") from None
    return parse_module(text, "<stdin>")
