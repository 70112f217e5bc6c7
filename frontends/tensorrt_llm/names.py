"""Every public name of TensorRT-LLM's API and what it is here; aliases, lint and guide read it.

A name is supported, accepted without effect (with the reason), or unsupported (with the
alternative). Names are those of versions 0.5 to 1.x, of both dialects; names.toml has them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ...errors import did_you_mean

Kind = Literal["supported", "without effect", "unsupported"]
ROOT = "tensorrt_llm"
_PACKAGE = __name__.rpartition(".")[0]
_OTHERS = {"methods", "keywords", "modules"}  # what a part of names.toml has beside modules


@dataclass(frozen=True)
class Name:
    """One public name: its module (without `tensorrt_llm.`), what it is here, and why."""

    module: str
    name: str
    kind: Kind
    why: str = ""

    @property
    def path(self) -> str:
        """The name with its module, as scripts write it."""
        return ".".join(filter(None, (ROOT, self.module, self.name)))

    def find(self) -> Any:
        """The object of irc with this name; AttributeError where there is none."""
        for candidate in candidates(self.module):
            try:
                module = import_module(candidate, _PACKAGE)
            except ModuleNotFoundError as error:
                if error.name is None or not error.name.startswith("irc."):
                    raise
                continue
            found = getattr(module, self.name, None)
            origin = str(getattr(found, "__module__", "irc")).partition(".")[0]
            if found is not None and origin in ("irc", "functools"):
                return found  # not what the module imports from elsewhere
        raise AttributeError(f"irc has no {self.path}")


# Modules of irc that hold the names of a module whose counterpart has another name, or several.
_CANDIDATES = {
    "": ("functional", "network", "module", "builder", "mapping", "dtypes", "utilities", "tensor"),
    "_utils": ("dtypes", "utilities"),
    "_common": ("network", "utilities"),
    "functional": ("functional", "enums", "tensor"),
    "bindings": ("settings", "dtypes"),
    "builder": ("builder", "settings", "network"),
    "llmapi.kv_cache_type": ("settings",),
    "module": ("module",),
    "parameter": ("module",),
    "layers": ("layers", "enums", "functional"),
    "layers.attention": ("layers", "functional", "enums"),
    "plugin": ("settings",),
    "models": ("models", "quantization", "layers.quantize", "settings"),
    "models.modeling_utils": (
        "models.config",
        "models.decoder",
        "models",
        "quantization",
        "settings",
    ),
    "quantization": ("quantization", "layers.quantize"),
}


def candidates(module: str) -> list[str]:
    """The modules of irc, relative to this package, that may hold the names of an old module."""
    found = _CANDIDATES.get(module)
    while found is None:
        parent = module.rpartition(".")[0]
        found = (module, *_CANDIDATES.get(parent, (parent,))) if parent else (module,)
    return [f".{name}" for name in found]


@cache
def _sections() -> dict[str, Any]:
    with (Path(__file__).parent / "names.toml").open("rb") as file:
        return tomllib.load(file)


def _rows() -> Iterator[tuple[str, str, Kind, str]]:
    """(module, or one of _OTHERS; a name; its kind; why) for every name of names.toml."""
    sections = _sections()
    parts: dict[Kind, list[dict[str, str]]] = {
        "supported": [sections["supported"]],
        "without effect": sections["without-effect"],
        "unsupported": sections["unsupported"],
    }
    for kind, every in parts.items():
        for part in every:
            for module, names in part.items():
                for name in names.split() if module != "why" else ():
                    yield module, name, kind, part.get("why", "")


def _other(key: str) -> dict[str, tuple[Kind, str]]:
    return {name: (kind, why) for module, name, kind, why in _rows() if module == key}


@cache
def methods() -> dict[str, tuple[Kind, str]]:
    """What the methods of objects are that a script reaches without importing a name, and why."""
    return _other("methods")


@cache
def keywords() -> dict[str, str]:
    """Arguments that any function or class takes without effect, and why."""
    return {name: why for name, (_, why) in _other("keywords").items()}


@cache
def table() -> dict[tuple[str, str], Name]:
    """Every public name by (module, name)."""
    return {row[:2]: Name(*row) for row in _rows() if row[0] not in _OTHERS}


@cache
def modules() -> dict[str, str]:
    """Every listed module with its alternative; "" where some of its names are supported."""
    known = {module for module, _ in table()} | _sections()["supported"].keys() - _OTHERS
    return dict.fromkeys(sorted(known), "") | {n: why for n, (_, why) in _other("modules").items()}


def alternative(module: str) -> str | None:
    """What to use instead of a module, or the nearest unsupported one around it.

    "" where names of it are supported; None where no such module is known.
    """
    listed = modules()
    if module in listed:
        return listed[module]
    parent, _, own = module.rpartition(".")
    if f"{parent}.*" in listed:
        return listed[f"{parent}.*"] if own.islower() else None
    return alternative(parent) or None if parent else None


def look_up(module: str, name: str) -> Name | None:
    """What a name is here; in an unknown part of a package, what the package says of it."""
    found = table().get((module, name))
    if found is not None:
        return found
    if why := alternative(module):
        return Name(module, name, "unsupported", why)
    parent = module.rpartition(".")[0]
    inherited = table().get((parent, name)) if parent else None
    if inherited is not None and inherited.kind == "unsupported":
        return Name(module, name, "unsupported", inherited.why)
    return None


def suggestion(module: str, name: str) -> str:
    """`; did you mean ...?` among the names of a module."""
    return did_you_mean(name, [known for where, known in table() if where == module])
