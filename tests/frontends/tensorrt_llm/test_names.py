"""The table of names: what is supported is there, and what is there is listed."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from irc.frontends.tensorrt_llm.api import rows
from irc.frontends.tensorrt_llm.names import ROOT, Name, methods, modules, table

PACKAGES = ("functional", "layers", "models", "quantization")


def names(kind: str) -> Iterator[Name]:
    """The names of a kind that are no modules."""
    listed = (name for name in table().values() if name.kind == kind)
    return (name for name in listed if f"{name.module}.{name.name}".lstrip(".") not in modules())


@pytest.mark.parametrize("module", sorted({name.module for name in names("supported")}))
def test_every_supported_name_is_there(module: str) -> None:
    wanted = [name for name in names("supported") if name.module == module]
    assert not [name.path for name in wanted if name.name != "__version__" and not exists(name)]


def exists(name: Name) -> bool:
    try:
        name.find()
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_listed(package: str) -> None:
    module = import_module(f"irc.frontends.{ROOT}.{package}")
    exported = {name for name, value in vars(module).items() if is_exported(name, value, package)}
    known = {name.name for name in table().values()} | {path.split(".")[-1] for path in rows()}
    assert not exported - known


def is_exported(name: str, value: object, package: str) -> bool:
    """Whether a value of a package is one of its own names."""
    if name.startswith("_") or isinstance(value, ModuleType):
        return False
    origin = getattr(value, "__module__", None) or ""
    return origin.startswith(f"irc.frontends.{ROOT}.{package}") and not inspect.ismodule(value)


def test_names_without_effect_and_unsupported_ones_give_a_reason() -> None:
    kinds = [(name.path, name.kind, name.why) for name in table().values()]
    kinds += [(name, kind, why) for name, (kind, why) in methods().items()]
    assert not [path for path, kind, why in kinds if (kind == "supported") == bool(why)]
