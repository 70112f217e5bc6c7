"""Importing irc, its folders or its command line loads numpy, ml_dtypes and nothing heavier."""

import subprocess
import sys

import pytest

from tests.layout import ROOT

LIST = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
LOADERS = {"filelock", "msgspec", "onnx", "onnxruntime", "tokenizers", "torch", "transformers"}
HEAVY = LOADERS | {"networkx"}
MODULES = ["irc", "irc.passes", "irc.backends", "irc.frontends", "irc.cli.main"]


def loaded(statement: str) -> set[str]:
    """The top-level names in sys.modules after a statement in a fresh interpreter."""
    command = [sys.executable, "-c", f"{statement}\n{LIST}"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_import_loads_nothing_heavy(module: str) -> None:
    # What an empty start loads (finders of editable installs) is not our doing.
    allowed = loaded("import numpy, ml_dtypes") | sys.stdlib_module_names | {"irc"}
    extra = loaded(f"import {module}") - allowed
    assert not extra & HEAVY, f"import {module} loads {sorted(extra & HEAVY)}"
    assert not extra, f"import {module} loads {sorted(extra)}"


def test_a_pipeline_names_the_import_of_irc_passes() -> None:
    code = """
from irc.errors import Error
from irc.pipeline import parse_pipeline
try:
    parse_pipeline("cse")
except Error as error:
    assert "import irc.passes, which registers irc's own passes" in error.message, error
else:
    raise AssertionError
import irc.passes
parse_pipeline("cse")
"""
    loaded(code)
