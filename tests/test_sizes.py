"""House rules of the tree: short files that say what they are for, links, packages, settings."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layout import LINKED, ROOT, package_files, project, python_files

LONGEST = 800
SOURCES = ("irc", *LINKED, "examples", "tests", "benchmarks", ".ci")


def all_sources() -> list[Path]:
    return [file for folder in SOURCES for file in python_files(folder)]


def folders_with(files: list[Path]) -> set[str]:
    """The import names of the folders that these files of irc lie in."""
    relative = {file.parent.relative_to(ROOT) for file in files}
    return {".".join(("irc", *[p for p in path.parts if p != "irc"])) for path in relative}


def test_no_source_file_is_too_long() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in all_sources()}
    long = [f"{f.relative_to(ROOT)}: {n} lines" for f, n in lengths.items() if n > LONGEST]
    assert not long, f"split these, the limit is {LONGEST}: {', '.join(long)}"


def test_every_file_says_first_what_it_is_for() -> None:
    silent = [str(file.relative_to(ROOT)) for file in all_sources() if not says_purpose(file)]
    assert not silent, f"no docstring on the first line: {', '.join(silent)}"


def says_purpose(file: Path) -> bool:
    """Whether a docstring begins on line 1, or on line 2 after a shebang; empty files pass."""
    source = file.read_text(encoding="utf-8")
    if not source:
        return True
    body = ast.parse(source).body
    docstring = ast.get_docstring(ast.parse(source), clean=False)
    first = 2 if source.startswith("#!") else 1
    return bool(docstring and docstring.splitlines()[0].strip() and body[0].lineno == first)


@pytest.mark.parametrize("name", LINKED)
def test_links_are_links(name: str) -> None:
    link = ROOT / "irc" / name
    assert link.is_symlink(), f"{link} is no link: git config core.symlinks true, then check out"
    assert link.readlink() == Path("..") / name


def test_listed_packages_are_those_on_disk() -> None:
    packages = [file for file in package_files().values() if file.name == "__init__.py"]
    on_disk = sorted(folders_with(packages))
    listed = project()["tool"]["setuptools"]["packages"]
    # Printed in the form of pyproject.toml, to be pasted there.
    lines = "".join(f'    "{name}",\n' for name in on_disk)
    assert listed == on_disk, f"[tool.setuptools] wants\npackages = [\n{lines}]"


def test_every_folder_with_python_is_a_package() -> None:
    files = list(package_files().values())
    packages = [file for file in files if file.name == "__init__.py"]
    assert folders_with(files) == folders_with(packages), "a folder lacks its __init__.py"


def test_linked_folders_are_mapped() -> None:
    expected = {"irc": "irc", **{f"irc.{name}": name for name in LINKED}}
    assert project()["tool"]["setuptools"]["package-dir"] == expected


def test_type_checker_is_strict_but_for_backends() -> None:
    settings = project()["tool"]["basedpyright"]
    paths = [file.relative_to(ROOT / "irc") for file in python_files("irc")]
    below = {f"irc/{path.parts[0]}" for path in paths if len(path.parts) > 1}
    lax = (below | {"irc/*.py", "irc/frontends", "irc/passes"}) - set(settings["strict"])
    assert not lax, f"[tool.basedpyright] strict lacks {sorted(lax)}"


@pytest.mark.parametrize("name", LINKED)
def test_bare_import_is_refused(name: str) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode != 0
    assert f"ImportError: import irc.{name}, not {name}" in answer.stderr
