"""NVIDIA's scripts and unit tests through irc, where IRC_TENSORRT_LLM_SOURCES has their sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layout import ROOT

SOURCES = os.environ.get("IRC_TENSORRT_LLM_SOURCES")
pytestmark = [
    pytest.mark.skipif(not SOURCES, reason="set IRC_TENSORRT_LLM_SOURCES to NVIDIA's sources"),
    pytest.mark.timeout(3600),
]
RELEASES = sorted(path.name for path in Path(SOURCES).glob("0.*")) if SOURCES else []
SCRIPTS = ("llama/build.py plain", "llama/convert_checkpoint.py plain", "bert/build.py plain")
# folders or files of tests, and the backend of their engines: the layers round every result
TESTS = {"functional": "onnx", "attention": "onnx", "test_layer.py": "reference"}


def rows(kind: str, release: str, name: str, output: Path, *options: str) -> list[list[str]]:
    """(name, outcome, obstacle, where) of every script or test whose name begins with `name`."""
    command = ["-m", "benchmarks.tensorrt_llm_corpus", kind, release, name, *options]
    subprocess.run([sys.executable, *command, "--output", str(output)], cwd=ROOT, check=True)
    table = (output / f"{release}-{kind}.txt").read_text(encoding="utf-8").splitlines()[:-1]
    return [line.split(" | ")[1:] for line in table]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("release", RELEASES)
def test_scripts_give_what_transformers_computes(release: str, name: str, tmp_path: Path) -> None:
    failed = [row for row in rows("scripts", release, name, tmp_path) if row[1] != "pass"]
    assert not failed


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("release", RELEASES)
def test_unit_tests_give_no_wrong_number(release: str, name: str, tmp_path: Path) -> None:
    table = rows("tests", release, name, tmp_path, "--cases", "1", "--backend", TESTS[name])
    assert not [row for row in table if row[1] == "wrong number"]
    counted = [row for row in table if row[1] not in ("skipped", "refused")]
    assert sum(row[1] == "pass" for row in counted) >= 0.9 * len(counted)
