"""Model families, a file each. Importing this registers them all."""

from importlib import import_module
from pkgutil import iter_modules

for _family in sorted(part.name for part in iter_modules(__path__)):
    import_module(f"{__name__}.{_family}")
