"""What a test loads from files of a user's own, taken back when it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from irc.backends.tensorrt.lowering.table import CHOICES
from irc.backends.tensorrt.plugins import SPECS
from irc.declare import REGISTRY
from irc.frontends import functional
from irc.pipeline import PASSES

EXAMPLE = Path(__file__).parents[1] / "examples" / "custom_plugin.py"


@contextmanager
def taken_back() -> Iterator[None]:
    """Registries, functions of scripts and loaded files are afterwards what they were before."""
    import irc.ops as ops
    import irc.passes as passes

    assert ops and passes  # what irc registers itself stays
    registries: list[dict[Any, Any]] = [PASSES, REGISTRY, SPECS, CHOICES.users]
    before, loaded = [dict(each) for each in registries], _hidden()
    try:
        yield
    finally:
        for name in REGISTRY.keys() - before[1].keys():
            if name in vars(functional):
                delattr(functional, name)
        for registry, kept in zip(registries, before, strict=True):
            registry.clear()
            registry.update(kept)
        _hidden()
        sys.modules.update(loaded)


def _hidden() -> dict[str, ModuleType]:
    """The files that were loaded, as if they had not been."""
    names = [name for name in sys.modules if name.startswith("irc_loaded_")]
    return {name: sys.modules.pop(name) for name in names}
