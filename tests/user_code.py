"""Restores the registries after a test that loads files of a user."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from irc.backends.tensorrt.lowering.table import CHOICES
from irc.backends.tensorrt.plugins import SPECS
from irc.frontends import functional
from irc.ir.declare import REGISTRY
from irc.pipeline import PASSES

EXAMPLE = Path(__file__).parents[1] / "examples" / "custom_plugin.py"


@contextmanager
def restored_registries() -> Iterator[None]:
    """Restore registries, functions of scripts and loaded files at the end."""
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
    """Remove the loaded files from sys.modules and return them."""
    names = [name for name in sys.modules if name.startswith("irc_loaded_")]
    return {name: sys.modules.pop(name) for name in names}
