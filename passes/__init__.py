"""Transformations of modules: one file per pass. Importing this registers them all."""

if __name__ != "irc.passes":
    raise ImportError("import irc.passes, not passes: a bare import loads a second copy")

from importlib import import_module
from pkgutil import iter_modules

for _part in sorted(part.name for part in iter_modules(__path__)):
    import_module(f"{__name__}.{_part}")
