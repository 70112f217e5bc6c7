"""Every operation of the language. Importing this registers them all."""

from __future__ import annotations

from ..core import Op
from ..declare import REGISTRY
from . import control, elementwise


def __getattr__(name: str) -> type[Op]:
    for cls in REGISTRY.values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"irc.ops has no operation class {name!r}")
