"""The linter: finds, without TensorRT, what it drops or miscomputes in an ONNX file without a word.

`RULES` is the table, one row per fault; `lint` applies it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from onnx.onnx_ml_pb2 import ModelProto

from irc.backends.tensorrt.builder.model import Unreadable, parse
from irc.backends.tensorrt.lint.graph import Graph, skeleton, types_of
from irc.backends.tensorrt.lint.rules import RULES, Finding, Rule
from irc.errors import Error, did_you_mean
from irc.onnx_format.files import is_text

__all__ = ["RULES", "Finding", "Rule", "Unreadable", "lint", "lint_file"]


def lint(model: ModelProto, ignore: Collection[str] = ()) -> list[Finding]:
    """The findings of all rules that are not named in `ignore`, errors first."""
    for name in ignore:
        if name not in RULES:
            raise Error(f"no rule is called {name!r}{did_you_mean(name, RULES)}")
    rules = [rule for rule in RULES.values() if rule.name not in ignore]
    bare = skeleton(model)
    (types, *inner), trouble = types_of(bare, model.graph.initializer)
    graphs = list(Graph(bare.graph, types, trouble).all(iter(inner)))
    findings = [f for rule in rules for graph in graphs for f in rule.findings(graph)]
    distinct = dict.fromkeys(findings)  # a function that is called twice is inlined twice
    return sorted(distinct, key=lambda finding: finding.severity)


def lint_file(path: Path, ignore: Collection[str] = ()) -> list[Finding]:
    """The findings about a file; an Error where it is not an ONNX model."""
    _, model = parse(path)  # without its external data
    if not is_text(model):
        raise Error(f"{path} is damaged: a name in it is not UTF-8 text; export it again")
    try:
        return lint(model, ignore)
    except Error as error:
        error.add_note(f"in {path}")
        raise
