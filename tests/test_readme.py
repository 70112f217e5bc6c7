"""The README shows what the commands print: its script is compiled, its dump and table compared."""

from __future__ import annotations

import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest

from tests.cli.runner import works
from tests.layout import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(start: str) -> str:
    """The fenced block whose first line begins with `start`."""
    for body in re.findall(r"```\w+\n(.*?)```", README, re.DOTALL):
        if body.startswith(start):
            return body
    raise AssertionError(f"the README has no block that starts with {start!r}")


@pytest.fixture
def scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the README's first commands were run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scorer.py").write_text(block("# scorer.py"))
    np.savez(tmp_path / "ids.npz", ids=np.arange(20).reshape(2, 10))
    for line in re.findall(r"^    irc (.*scorer.*)$", README, re.MULTILINE):
        command = line.partition("#")[0].split("|")[0]
        works(*shlex.split(command))
    return tmp_path


def test_the_script_compiles_to_the_dump_that_is_shown(scorer: Path) -> None:
    assert works("show", "build/scorer").out == block("module @scorer")
    assert np.load(scorer / "scores.npz")["score"].shape == (2, 1)


def test_the_sharded_layer_is_what_is_compiled(tmp_path: Path) -> None:
    tiny = ROOT / "examples" / "tiny_llama"
    words = ["--checkpoint", tiny, "--backend", "reference", "--mesh", "tp=2"]
    passes = ["--pipeline", "inline, shard, fuse-gated-mlp"]
    works("compile", ROOT / "examples" / "llama.py", "-o", tmp_path / "out", *words, *passes)
    shown = works("show", tmp_path / "out", "--scope", "model.layers.0").out
    assert textwrap.indent(block("%post_attention_layernorm"), "    ") in shown


def test_the_table_of_operations_is_the_one_that_is_printed() -> None:
    guide = (ROOT / "irc" / "ops" / "README.md").read_text(encoding="utf-8")
    assert works("ops", "--markdown").out.strip() in guide


def test_the_command_of_the_readme_is_there_after_make_demo() -> None:
    before, _, after = README.partition("source .venv/bin/activate")
    assert "make demo" in before and "    irc " not in before and "    irc " in after


def test_advice_installs_from_the_checkout() -> None:
    """The distribution is not on the package index; the extras are those of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path in (*ROOT.glob("*.md"), *ROOT.glob("[!.]*/**/*.md"), *ROOT.glob("[!.]*/**/*.py")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install [^`\n]*irc-compiler\[", text), path
        for listed in re.findall(r"(?:pip install '\.\[|installs\(['\"])([\w,-]+)", text):
            assert set(listed.split(",")) <= set(extras["optional-dependencies"]), path


def test_every_command_of_the_readme_exists() -> None:
    listed = set(re.findall(r"^  ([\w-]+)  ", works("--help").out, re.MULTILINE))
    named = set(re.findall(r"`irc (\w[\w-]*)", README)) - {"COMMAND"}
    assert named <= listed
    assert listed <= named
