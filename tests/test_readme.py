"""The README shows what the commands print: its script is compiled, its dump and table compared."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.ir.declare import REGISTRY
from irc.ir.verify import verify
from irc.pipeline import load_file
from irc.text import parse_module, print_module
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


def indented(guide: str, start: str) -> str:
    """The indented block of a folder's guide that begins with `start`."""
    text = (ROOT / guide / "README.md").read_text(encoding="utf-8")
    blocks = [
        textwrap.dedent(b) for b in re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    ]
    (found,) = [b.strip("\n") + "\n" for b in blocks if b.strip("\n").startswith(start)]
    return found


def test_the_module_of_the_language_guide_is_a_module() -> None:
    text = indented("irc", "module @demo")
    module = parse_module(text)
    verify(module)
    assert print_module(module, locs=True) == text


def test_the_operation_of_the_language_guide_works(tmp_path: Path) -> None:
    path = tmp_path / "double.py"
    path.write_text(indented("irc", "from irc import Op"))
    text = "module @m { func @f(%x: f32[2]) -> (f32[2]) { %y = double %x : f32[2] return %y } }"
    try:
        load_file(path)
        outputs = evaluate(parse_module(text), {"x": np.array([1, 3], np.float32)})
        assert outputs["result0"].tolist() == [2, 6]
    finally:
        REGISTRY.pop("double", None)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_script_of_the_frontends_guide_compiles(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "scorer.py"
    path.write_text(indented("frontends", "import irc"))
    flags = ["--random-weights", "0", "--dtype", dtype, "--set", "hidden=8"]
    assert "scorer" in works("compile", str(path), *flags, "-o", str(tmp_path / "out")).out


def test_the_table_of_operations_is_the_one_that_is_printed() -> None:
    guide = (ROOT / "irc" / "ops" / "README.md").read_text(encoding="utf-8")
    assert works("ops", "--markdown").out.strip() in guide


def test_every_command_of_the_readme_exists() -> None:
    listed = set(re.findall(r"^  (\w+)  ", works("--help").out, re.MULTILINE))
    named = set(re.findall(r"`irc (\w+)", README)) - {"COMMAND"}
    assert named <= listed
    assert listed <= named


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
