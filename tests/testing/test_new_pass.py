"""`irc new-pass`: each kind of pass works, is clean, and passes its test; the guide shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import irc.testing.templates
from irc.cli.new_pass import KINDS
from irc.errors import Error
from irc.pipeline.base import PASSES, RESERVED, Pass, register
from tests.cli.runner import entries, refused, works
from tests.layout import ROOT

TEMPLATES = Path(str(irc.testing.templates.__file__)).parent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(*words: str) -> str:
    """What a program prints that has to succeed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_kind_works_and_is_clean(folder: Path) -> None:
    out = [works("new-pass", f"try-{kind}", "--kind", kind, "-o", "mine").out for kind in KINDS]
    names = [f"{start}try_{kind}.py" for start in ("", "test_") for kind in sorted(KINDS)]
    assert entries(folder / "mine") == sorted(names)
    assert "python -m pytest mine/test_try_substitution.py" in out[0]
    plain = ("-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".")
    assert "7 passed" in checked(sys.executable, "-m", "pytest", *plain, "-s", "mine")
    checked(sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "mine")
    for name in names:
        text = (folder / "mine" / name).read_text()
        assert "my-pass" not in text and "MyPass" not in text and "my_pass" not in text
    shown = works("passes", "try-fusion", "--load", "mine/try_fusion.py").out
    assert "silu(x · gate) * (x · up) becomes one gated_mlp." in shown
    words = ["--load", "mine/try_substitution.py", "--random-weights", "0", "--dry-run", "--json"]
    words += ["--pipeline", "default, after cse: try-substitution"]
    made = works("compile", ROOT / "examples" / "two_tower.py", *words).json["passes"]
    at = [step["pass"] for step in made].index("try-substitution")
    assert made[at - 1]["pass"] == "cse"


def test_a_class_hides_no_name_that_it_uses(folder: Path) -> None:
    works("new-pass", "silu")
    assert "class SiluPass(Pass):" in (folder / "silu.py").read_text()
    assert "x * sigmoid(x) becomes" in works("passes", "silu", "--load", "silu.py").out


def test_wrong_names_and_files_that_exist_are_refused(folder: Path) -> None:
    for name in ("Fuse", "a_b", "-a", "a--b", "1a", "a/b", "ä", ""):
        assert "is no name of a pass" in refused("new-pass", "--", name)
    assert "irc has a pass called cse already" in refused("new-pass", "cse")
    for name in ("json", "conftest"):
        assert f"would hide the Python module {name}" in refused("new-pass", name)
    for name in (*RESERVED, "class", "in"):
        assert f"{name} is a word of pipelines or of Python" in refused("new-pass", name)
    assert "did you mean 'fusion'" in refused("new-pass", "a", "--kind", "fuison", status=2)
    (folder / "test_a_b.py").write_text("mine")
    assert "test_a_b.py exists, and is left as it is" in refused("new-pass", "a-b")
    assert entries(folder) == ["test_a_b.py"] and (folder / "test_a_b.py").read_text() == "mine"


@pytest.mark.parametrize("name", RESERVED)
def test_no_pass_has_the_name_of_a_word_of_pipelines(name: str) -> None:
    with pytest.raises(Error, match=f"{name} is a word of pipelines"):
        register(name)(Pass)
    assert name not in PASSES


@pytest.mark.parametrize("kind", KINDS)
def test_the_guide_shows_the_passes_that_are_written(kind: str) -> None:
    text = (TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    assert f"```python\n{text}```" in (ROOT / "passes" / "README.md").read_text(encoding="utf-8")
