"""Reads the modules that commands work on: a file, a folder, a script, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..errors import Error
from ..ir.core import Module
from .console import warn

STDIN = "-"


def read_module(place: str, **options: Any) -> Module:
    """The module of `load_module`, verified."""
    from ..ir.verify import verify

    module = load_module(place, **options)
    verify(module)
    return module


def load_module(place: str, **options: Any) -> Module:
    """The module in a file, in an artifact folder, or on standard input (`-`).

    A script is run, with the `options` of `script_options`; its weights may be unbound.
    """
    from ..driver.sources import find_source, is_script
    from ..driver.sources import read_module as read_place

    if is_script(place):
        return find_source(place, **options, bound=False).module
    if options:
        name = next(iter(options)).replace("settings", "set")
        raise Error(f"{place} is not a script, so --{name} has no effect; leave it out")
    return _from_stdin() if place == STDIN else read_place(Path(place))


def weights_folder(place: str) -> Path:
    """The folder at which relative paths of weight files start in a module of `read_module`."""
    from ..driver.sources import is_onnx, is_script

    path = Path(place)
    if place == STDIN or is_script(place) or is_onnx(path):
        return Path()
    return path if path.is_dir() else path.parent


def _from_stdin() -> Module:
    from ..driver.sources import parse_bytes

    if sys.stdin.isatty():
        warn("irc: reading a module from the keyboard; ctrl-D ends it")
    return parse_bytes(sys.stdin.buffer.read(), "<stdin>")
