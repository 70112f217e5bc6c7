"""The page "from trtllm-build to irc": its commands run as printed, and generate the same text."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runner import works
from tests.layout import ROOT

PAGE = (ROOT / "frontends" / "tensorrt_llm" / "from_trtllm_build.md").read_text(encoding="utf-8")


@pytest.mark.oracle
def test_every_command_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    texts: list[str] = []
    for line in re.findall(r"^    (.*)$", PAGE, re.MULTILINE):
        words = shlex.split(line)
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], check=True, cwd=tmp_path)
            continue
        answer = works(*words[1:])
        if words[1] == "generate" and "--raw-ids" not in words:
            texts.append(answer.out)
        if words[1] == "lint":
            assert "100% taken" in answer.out
    assert len(texts) == 3 and len(set(texts)) == 1 and texts[0].startswith("The Python")
