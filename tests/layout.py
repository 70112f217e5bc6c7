"""The source files of irc and their module names, for the layout tests."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("backends", "frontends", "passes")


def project() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python_files(folder: str) -> list[Path]:
    """Every .py file below a top-level folder, sorted, links not followed."""
    return sorted(_below(ROOT / folder))


def package_files() -> dict[str, Path]:
    """Module name -> file, for everything that is imported as irc or below it."""
    files = [file for folder in ("irc", *LINKED) for file in python_files(folder)]
    return {module_name(file): file for file in files}


def module_name(file: Path) -> str:
    """The name a file is imported by: passes/cse.py is irc.passes.cse."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "irc":
        parts.insert(0, "irc")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def _below(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _below(entry)
        elif entry.suffix == ".py":
            yield entry
