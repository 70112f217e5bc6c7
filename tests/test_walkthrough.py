"""The walkthrough of the guide: its commands find what it says, and print what it shows."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.runner import irc
from tests.layout import ROOT
from tests.user_code import restored_registries

GUIDE = (ROOT / "irc" / "debug" / "README.md").read_text(encoding="utf-8")
WALK = GUIDE.partition("## A walkthrough\n")[2].partition("\n## ")[0]
STEPS = re.findall(r"((?:^    irc .*\n)+)\n(?:```\n([^`]*)```)?", WALK, re.MULTILINE)
FUSED = "new: Op = fused(total.x, total.y,"
BROKEN = 'new: Op = fused(total.x, total.x if "layers.3." in str(norm.loc) else total.y,'


@pytest.fixture(autouse=True)
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the checkpoints and the pass of the walkthrough, in which its commands run."""
    for name in ("good", "swapped"):
        shutil.copytree(ROOT / "examples" / "tiny_llama", tmp_path / name)
    weights = load_file(tmp_path / "good" / "model.safetensors")
    gate, up = (f"model.layers.2.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]
    save_file(weights, tmp_path / "swapped" / "model.safetensors")
    text = (ROOT / "passes" / "fuse_norm.py").read_text()
    assert FUSED in text
    text = text.replace('"fuse-norm"', '"my-fuse-norm"').replace(FUSED, BROKEN)
    text = text.replace("from .shared", "from irc.passes.shared")
    (tmp_path / "my_fuse_norm.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with restored_registries():
        yield


def without_numbers(text: str) -> list[str]:
    """The words of a line, its numbers replaced: they depend on the machine."""
    return re.sub(r"\d+(?:[.,]\d+)*(?:e-?\d+)?(?: [kMG]?B\b)?", "#", text).split()


def test_the_commands_print_what_is_shown() -> None:
    assert len(STEPS) == 7
    for commands, shown in STEPS:
        printed = ""
        for command in commands.splitlines():
            done = irc(*shlex.split(command)[1:])
            assert done.status in (0, 1) and "error:" not in done.err, done.err
            printed += done.out
        lines = [without_numbers(line) for line in printed.splitlines()]
        for line in shown.splitlines():
            assert without_numbers(line) in lines, f"{line}\nis not printed:\n{printed}"
