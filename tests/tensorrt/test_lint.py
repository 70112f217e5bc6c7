"""The linter: every rule by its examples, places, types, inner graphs, reports, damaged files.

A rule finds the bad model and not the good one. Where TensorRT-RTX is installed, it has to do with
the bad model what the example says, which is mostly to build it, and to build the good one.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from onnx import NodeProto, TensorProto, helper

from irc.backends.tensorrt.lint import RULES, Finding, lint, lint_file
from irc.backends.tensorrt.lint.rules import notes
from irc.errors import Error
from tests.cli.runner import works
from tests.fresh import fresh
from tests.layout import ROOT
from tests.tensorrt.graphs import F16, collective, model, node
from tests.tensorrt.lint_examples import TABLE, Example

EXAMPLES = [(rule, example) for rule, examples in TABLE.items() for example in examples]
ONE = "x:f16[4,8]"
TINY = (ROOT / "examples" / "llama.py", "--checkpoint", ROOT / "examples" / "tiny_llama")
TRACE = 'File "run.py", line 1, in f\nFile "net.py", line 12, in forward\n  y = x.relu()'
NAMED = [pytest.param(*each, id=f"{i}-{each[0]}") for i, each in enumerate(EXAMPLES)]


def test_every_rule_has_an_example() -> None:
    assert {rule for rule, example in EXAMPLES if example.good is not None} == set(RULES)


@pytest.mark.parametrize(("rule", "example"), NAMED)
def test_a_rule_finds_only_the_bad_model(rule: str, example: Example) -> None:
    findings = lint(example.bad)
    assert rule in rules(findings)
    assert rule not in rules(lint(example.bad, ignore=[rule]))
    if example.good is not None:
        assert rule not in rules(lint(example.good))
    for finding in findings:
        fault, _, advice = finding.message.partition("; ")
        assert fault and advice and not advice.endswith("."), finding


def rules(findings: list[Finding]) -> list[str]:
    return [finding.rule for finding in findings]


@pytest.mark.needs_rtx
def test_the_library_refuses_the_bad_models_and_builds_the_good_ones(tmp_path: Path) -> None:
    expected: dict[str, tuple[str, str]] = {}
    for rule, example in EXAMPLES:
        if example.refused is None:
            continue
        for proto, refused in ((example.bad, example.refused), (example.good, "")):
            if proto is not None:
                data = proto.SerializeToString(deterministic=True)
                name = f"{hashlib.sha256(data).hexdigest()[:20]}-80+89+120.onnx"
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


# ------------------------------------------------------------------ places, types and inner graphs


def branch(operation: NodeProto) -> Any:
    """A graph of one node, as a branch of If."""
    result = helper.make_tensor_value_info(operation.output[0], F16, [4, 8])
    return helper.make_graph([operation], "inner", [], [result])


@pytest.mark.parametrize(
    ("name", "key", "value", "place"),
    [
        ("model.layers.0/relu/Relu.y", "loc", "llama.py:7", "llama.py:7 model.layers.0/relu"),
        ("node_relu_3", "pkg.torch.onnx.stack_trace", TRACE, "net.py:12 node_relu_3"),
    ],
)
def test_a_finding_names_operation_and_line(name: str, key: str, value: str, place: str) -> None:
    bad = node("Relu", "x", "y", "mine")
    bad.name = name
    bad.metadata_props.add(key=key, value=value)
    (finding,) = lint(model(bad))
    assert str(finding).startswith(f"error: {place}: the parser ignores")
    assert str(finding).endswith("[builtin-name]")


def test_errors_come_first() -> None:
    body = [node("Cast", "x", "d", to=TensorProto.DOUBLE), node("Relu", "x", "y", "mine")]
    assert [finding.severity for finding in lint(model(body))] == ["error", "warning"]


def test_types_are_inferred_through_operators_of_tensorrt() -> None:
    """4 queries become 8 by all_gather, as many as there are keys."""
    for shape, expected in (("[1,8,64]", []), ("[1,6,64]", ["attention-causal-alignment"])):
        heads = {"q_num_heads": 4, "kv_num_heads": 4, "is_causal": 1}
        body = [
            node("Transpose", "x", "t", perm=[1, 0, 2]),
            collective("all_gather", "t", "g"),
            node("Transpose", "g", "q", perm=[1, 0, 2]),
            node("Attention", "q k k", **heads),
        ]
        proto = model(body, f"x:f16[1,4,64] k:f16{shape}", "y:f16[1,8,64]")
        assert rules(lint(proto)) == expected


def test_graphs_inside_nodes_and_bodies_of_functions_are_read() -> None:
    inner, other = branch(node("Relu", "x", "t", "mine")), branch(node("Relu", "x", "r"))
    condition = node("If", "c", then_branch=inner, else_branch=other)
    assert rules(lint(model(condition, f"{ONE} c:bool[]"))) == ["builtin-name"]
    proto = model(node("Short", "x", "y", "mine"))
    body = [node("Cast", "a", "b", to=TensorProto.DOUBLE), node("Cast", "b", "c", to=F16)]
    opset = helper.make_opsetid("", 24)
    proto.functions.append(helper.make_function("mine", "Short", ["a"], ["c"], body, [opset]))
    assert rules(lint(proto)) == ["double"]


def test_models_without_inferred_types_are_linted() -> None:
    proto = model([node("Add", "x", "a"), node("Relu", "a", "y", "mine")])
    assert {"builtin-name", "untyped"} <= set(rules(lint(proto)))


@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "tp=1"),
        ("--mesh", "tp=2,pp=2"),
        ("--mesh", "tp=3", "--dtype", "bf16", "--weights", "outside"),
    ],
)
def test_models_of_irc_have_no_findings(words: tuple[str, ...], tmp_path: Path) -> None:
    to = ["--backend", "tensorrt-rtx", "--no-build", "-o", tmp_path / "out"]
    works("compile", *TINY, *to, *words)
    paths = sorted((tmp_path / "out").glob("*.onnx"))
    assert paths
    for path in paths:
        assert lint_file(path) == []


# ------------------------------------------------------------------ reports and damaged files


def warned(node: str) -> Finding:
    return Finding("some-rule", "warning", "m; c", node, f"scope/{node}", "net.py:1")


def test_a_finding_of_several_models_is_printed_once() -> None:
    same = {f"rank{i}.onnx": [warned("a")] for i in range(4)}
    assert notes(same | {"other.onnx": [], "last.onnx": [warned("b")]}) == [
        "rank0.onnx, rank1.onnx and 2 more: warning [some-rule] m; c\n    net.py:1  scope/a",
        "last.onnx: warning [some-rule] m; c\n    net.py:1  scope/b",
    ]


@pytest.mark.parametrize(
    "damaged", [collective("all_reduce", "x"), node("Cast", "x", "y", to=TensorProto.UINT8)]
)
def test_nodes_without_outputs(damaged: NodeProto) -> None:
    whole = model(damaged, ONE, "y:f16[4,8]")
    del whole.graph.node[0].output[:]
    assert rules(lint(whole)) in ([], ["untyped"])


def test_damaged_files_give_findings_or_an_error(tmp_path: Path) -> None:
    rng, path = fresh(83), tmp_path / "m.onnx"
    models = [example.bad.SerializeToString() for _, example in EXAMPLES]
    for _ in range(400):
        data = bytearray(models[int(rng.integers(len(models)))])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path.write_bytes(bytes(data))
        try:
            lint_file(path)
        except Error:
            continue
