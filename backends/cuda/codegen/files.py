"""The C++ files that kernels start with."""

from pathlib import Path


def helpers(*names: str) -> str:
    """The text of files of this folder, one after the other."""
    folder = Path(__file__).parent
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)
