"""Every rule of the linter, by its examples: it finds the bad model, and not the good one.

Where TensorRT-RTX is installed, it has to refuse the bad model where the example expects that, and
to build the good one.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from irc.backends.tensorrt.lint import _TOPICS, RULES, lint
from irc.backends.tensorrt.target import Target
from tests.layout import ROOT
from tests.tensorrt import lint_examples, lint_examples_types
from tests.tensorrt.refusal import Example

EXAMPLES = [
    (rule, example)
    for rule, every in (lint_examples.TABLE | lint_examples_types.TABLE).items()
    for example in ([every] if isinstance(every, Example) else every)
]
NAMED = [pytest.param(*each, id=f"{i}-{each[0]}") for i, each in enumerate(EXAMPLES)]


def test_every_rule_has_an_example_and_a_unique_name() -> None:
    assert {rule for rule, _ in EXAMPLES} == set(RULES)
    assert {rule for rule, example in EXAMPLES if example.good is not None} == set(RULES)
    assert len(RULES) == sum(len(topic.RULES) for topic in _TOPICS)


@pytest.mark.parametrize(("rule", "example"), NAMED)
def test_a_rule_finds_only_the_bad_model(rule: str, example: Example) -> None:
    target = Target.parse(example.target)
    found = lint(example.bad, target)
    assert rule in [each.rule for each in found]
    assert rule not in [each.rule for each in lint(example.bad, target, ignore=[rule])]
    if example.good is not None:
        assert rule not in [each.rule for each in lint(example.good, target)]
    for each in found:
        fault, _, advice = each.message.partition("; ")
        assert fault and advice and not advice.endswith("."), each


@pytest.mark.needs_rtx
def test_the_library_refuses_the_bad_models_and_builds_the_good_ones(tmp_path: Path) -> None:
    expected: dict[str, tuple[str, str]] = {}
    for rule, example in EXAMPLES:
        if example.refused is None:
            continue
        chips = "+".join(map(str, Target.parse(example.target).architectures))
        for model, refused in ((example.bad, example.refused), (example.good, "")):
            if model is not None:
                data = model.SerializeToString(deterministic=True)
                name = f"{hashlib.sha256(data).hexdigest()[:20]}-{chips}.onnx"
                (tmp_path / name).write_bytes(data)
                expected[name] = rule, refused
    command = [sys.executable, "-m", "tests.tensorrt.refusal", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = [
        f"{rule}: expected {refused or 'built'}, found {found[name] or 'built'}"
        for name, (rule, refused) in expected.items()
        if found[name] != refused
    ]
    assert not wrong, "\n".join(wrong)
