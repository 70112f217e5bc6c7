"""Loads the files that fill the table of choices."""

from __future__ import annotations

from importlib import import_module

for _part in ("attention", "cache", "collective", "lookup", "plain", "quant"):
    import_module(f"irc.backends.tensorrt.lowering.lower_{_part}")
