"""The wheel: built, installed in a fresh environment, and used from outside the repository."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.layout import LINKED, ROOT, package_files, project

pytestmark = pytest.mark.slow

SHIPPED = ("pyproject.toml", "LICENSE", "README.md", "irc", *LINKED)
SMOKE = """
import importlib.util, pathlib, sys
import irc, irc.passes, irc.backends, irc.frontends
for module in (irc, irc.passes, irc.backends, irc.frontends):
    assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), module.__file__
for name in ("passes", "backends", "frontends"):
    assert importlib.util.find_spec(name) is None, f"{name} was installed at top level"
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command that has to succeed."""
    answer = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, f"{command}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves its build folder where it works."""
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", "dist", cwd=source)
    (wheel,) = (source / "dist").glob("irc_compiler-*.whl")
    return wheel


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, symlinks=True, ignore=ignored)
    elif source.exists():
        shutil.copy(source, target)


@pytest.fixture(scope="module")
def prefix(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, and the dependencies of the one that runs the tests."""
    prefix = tmp_path_factory.mktemp("environment")
    venv.create(prefix, with_pip=False)
    python = prefix / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", wheel, cwd=prefix)
    # A .pth of a folder that a .pth adds is not read, so an editable irc there stays out of sight.
    site = next(prefix.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return prefix


def test_wheel_holds_irc_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = f"irc_compiler-{project()['project']['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"irc", metadata}
    assert "irc/py.typed" in names


def test_wheel_holds_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    stems = {
        module.replace(".", "/") + ("/__init__" if file.name == "__init__.py" else "")
        for module, file in package_files().items()
    }
    missing = {f"{stem}.py" for stem in stems} - names
    assert not missing, f"not in the wheel: {sorted(missing)}"


def test_wheel_holds_what_modules_read(wheel: Path) -> None:
    """Sources of kernels, and tables, beside the modules."""
    names = set(zipfile.ZipFile(wheel).namelist())
    found = {
        file.relative_to(ROOT).as_posix().removeprefix("irc/")
        for folder in ("irc", *LINKED)
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in {".cuh", ".json", ".toml", ".pyi"}
    }
    assert "backends/cuda/codegen/prelude.cuh" in found
    missing = {f"irc/{name}" for name in found} - names
    assert not missing, f"not in the wheel: {sorted(missing)}"


def test_installed_irc_imports_elsewhere(prefix: Path, tmp_path: Path) -> None:
    run(prefix / "bin" / "python", "-c", SMOKE, cwd=tmp_path)


def test_installed_command_answers_elsewhere(prefix: Path, tmp_path: Path) -> None:
    assert "compile" in run(prefix / "bin" / "irc", "--help", cwd=tmp_path)
