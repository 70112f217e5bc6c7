"""Every rule of the linter: a model that breaks it, seen without the rule, and the cure.

Where TensorRT-RTX is installed it is asked, too: it refuses what the linter calls refused, and
builds the cured model.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from onnx import ModelProto

from irc.backends.tensorrt.lint import RULES, lint
from irc.backends.tensorrt.target import Target
from tests.layout import ROOT
from tests.tensorrt.lint_cases_attention import ATTENTION, CACHES
from tests.tensorrt.lint_cases_collective import COLLECTIVES, PLUGINS
from tests.tensorrt.lint_cases_forms import FORMS
from tests.tensorrt.lint_cases_graph import DTYPES, NETWORK, OPERATORS
from tests.tensorrt.lint_cases_plugins import UNKNOWN
from tests.tensorrt.lint_cases_quantized import REFUSED, UNFUSED
from tests.tensorrt.lint_cases_structure import STRUCTURE
from tests.tensorrt.lint_models import Case

CASES = [*ATTENTION, *CACHES, *COLLECTIVES, *PLUGINS, *DTYPES, *OPERATORS, *NETWORK]
CASES += [*FORMS, *REFUSED, *UNFUSED, *UNKNOWN, *STRUCTURE]
NAMED = [pytest.param(each, id=f"{i}-{each.rule}") for i, each in enumerate(CASES)]


def rules(model: ModelProto, case: Case, *ignore: str) -> list[str]:
    """The rules that a model breaks."""
    found = lint(model, Target.parse(case.target), case.folders, ignore)
    return [each.rule for each in found]


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == set(RULES)


@pytest.mark.parametrize("case", NAMED)
def test_the_fault_is_found_by_its_rule_alone(case: Case) -> None:
    assert case.rule in rules(case.bad, case)
    assert case.rule not in rules(case.bad, case, case.rule)


@pytest.mark.parametrize("case", NAMED)
def test_the_cure_has_nothing_of_the_fault(case: Case) -> None:
    if case.good is not None:
        assert case.rule not in rules(case.good, case)


def test_a_finding_says_what_to_do() -> None:
    for case in CASES:
        for found in lint(case.bad, Target.parse(case.target), case.folders):
            fault, _, cure = found.message.partition("; ")
            assert fault and cure and not cure.endswith("."), found


def verdicts(folder: Path) -> dict[str, str]:
    """What the library says to the models in a folder."""
    command = [sys.executable, "-m", "tests.tensorrt.lint_judge", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The library's verdict of every case, by number and b(ad) or g(ood)."""
    folder = tmp_path_factory.mktemp("models")
    files: dict[str, str] = {}
    for i, case in enumerate(CASES):
        if case.refused is None:
            continue
        chips = "+".join(map(str, Target.parse(case.target).architectures))
        for kind, model in (("bad", case.bad), ("good", case.good)):
            if model is not None:
                data = model.SerializeToString(deterministic=True)
                name = f"{hashlib.sha256(data).hexdigest()[:20]}-{chips}.onnx"
                (folder / name).write_bytes(data)
                files[f"{i}-{kind}"] = name
    found = verdicts(folder)
    return {key: found[name] for key, name in files.items()}


@pytest.mark.needs_rtx
def test_the_library_refuses_what_the_linter_refuses(judged: Mapping[str, str]) -> None:
    wrong = [
        f"{i} {case.rule}: {case.refused or 'built'} expected, {judged[f'{i}-bad'] or 'built'}"
        for i, case in enumerate(CASES)
        if case.refused is not None and judged[f"{i}-bad"] != case.refused
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.needs_rtx
def test_the_library_builds_the_cures(judged: Mapping[str, str]) -> None:
    wrong = [
        f"{i} {case.rule}: the cure is refused in {judged[f'{i}-good']}"
        for i, case in enumerate(CASES)
        if judged.get(f"{i}-good", "")
    ]
    assert not wrong, "\n".join(wrong)
