"""The table of names: what is supported is there, what is there is listed, and the guide has it.

Run as a script, this writes the guide.
"""

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from irc.frontends.tensorrt_llm.api import rows
from irc.frontends.tensorrt_llm.names import ROOT, Name, keywords, methods, modules, table
from tests.layout import ROOT as TREE

GUIDE = TREE / "frontends" / "tensorrt_llm" / "README.md"
MARK = "<!-- what follows is written by tests/frontends/tensorrt_llm/test_names.py -->\n"
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


def guide_tables() -> str:
    """The tables of the guide."""
    parts = ["| module | supported names |\n|---|---|\n"]
    for module in sorted({name.module for name in names("supported")}):
        found = sorted(name.name for name in names("supported") if name.module == module)
        parts.append(f"| `{module or ROOT}` | {' '.join(f'`{name}`' for name in found)} |\n")
    reasons: list[tuple[str, dict[str, list[str]]]] = [
        ("accepted without effect | why", {}),
        ("unsupported | instead", {}),
    ]
    for (_, rows), kind in zip(reasons, ("without effect", "unsupported"), strict=True):
        for name in names(kind):
            rows.setdefault(name.why, []).append(f"`{name.path.removeprefix(f'{ROOT}.')}`")
        for name, (_, why) in ((n, m) for n, m in methods().items() if m[0] == kind):
            rows.setdefault(why, []).append(f"`.{name}()`")
    for name, why in keywords().items():
        reasons[0][1].setdefault(why, []).append(f"`{name}=`")
    for module, why in modules().items():
        if why:
            reasons[1][1].setdefault(why, []).append(f"`{module.removesuffix('.*')}.*`")
    for title, rows in reasons:
        parts.append(f"\n| {title} |\n|---|---|\n")
        parts += [f"| {' '.join(dict.fromkeys(found))} | {why} |\n" for why, found in rows.items()]
    return "".join(parts)


def test_the_guide_has_the_table() -> None:
    assert GUIDE.read_text(encoding="utf-8").partition(MARK)[2] == guide_tables()


if __name__ == "__main__":
    text, mark, _ = GUIDE.read_text(encoding="utf-8").partition(MARK)
    GUIDE.write_text(text + mark + guide_tables(), encoding="utf-8")
