"""Modules from a few lines of text, for the tests of backends."""

from __future__ import annotations

from irc.ir.core import Module
from irc.text import parse_module


def module(args: str, results: str, body: str, head: str = "mesh(tp=2)", top: str = "") -> Module:
    """A module around the body of @forward."""
    lines = "\n".join(f"    {line.strip()}" for line in body.strip().splitlines())
    return parse_module(
        f"module @m {head} {{\n{top}\n  func @forward({args}) -> ({results}) {{\n{lines}\n  }}\n}}"
    )
