"""The C++ that kernels start with: files, and constants."""

from collections.abc import Mapping
from pathlib import Path


def helpers(*names: str) -> str:
    """The text of files of this folder, one after the other."""
    folder = Path(__file__).parent
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def constants(values: Mapping[str, bool | int | float]) -> str:
    """Constants of bool, int and f32, a line each; floats are exact."""
    kinds = {bool: "bool", int: "int", float: "float"}
    texts = {name: str(x).lower() if isinstance(x, bool) else repr(x) for name, x in values.items()}
    return "".join(f"constexpr {kinds[type(x)]} {n} = {texts[n]};\n" for n, x in values.items())


PRELUDE = helpers("prelude.cuh")  # what every kernel starts with
