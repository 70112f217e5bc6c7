"""What the linter says, and the registry of its rules.

A rule is a function over a node or a graph that yields sentences. Its name is the function's, its
reason the function's docstring; `source` tells where the fact can be looked up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict, Unpack

from irc.backends.tensorrt.lint.graph import Graph, Node
from irc.backends.tensorrt.target import FLAVOURS, Flavour, Target

Severity: TypeAlias = Literal["error", "warning"]
Complaint: TypeAlias = tuple[Node | None, str]
Version: TypeAlias = tuple[int, int]

# Where facts come from that more than one rule rests on.
BUILDER = "parser and builder of TensorRT-RTX 1.7.1.116"
IMPORTERS = "https://github.com/onnx/onnx-tensorrt/blob/main/onnxOpImporters.cpp"
ATTENTION = "https://github.com/onnx/onnx-tensorrt/blob/main/AttentionHelpers.cpp"
OPERATORS = "https://github.com/onnx/onnx-tensorrt/blob/main/docs/TRT_custom_ops.md"


@dataclass(frozen=True)
class Finding:
    """One fault of a model.

    `message` says what to do. `node` is the ONNX node, `op` the scope and name of the IR operation
    it came from, `source` the line of the model script; "" where not known.
    """

    rule: str
    severity: Severity
    message: str
    node: str = ""
    op: str = ""
    source: str = ""

    def __str__(self) -> str:
        places = (self.source, self.op or self.node)
        where = " ".join(place for place in places if place)
        return f"{self.severity}: {where}{': ' if where else ''}{self.message} [{self.rule}]"


@dataclass(frozen=True)
class Rule:
    """A check and where it holds: flavours, versions from `since` to below `before`, architectures.

    Where `architectures` are given, it holds if the target names one of them. `warns_on` are
    flavours on which an error is only a warning, because the fact was not seen there.
    """

    name: str
    reason: str
    source: str
    check: Callable[[Graph, Target], Iterable[Complaint]]
    severity: Severity = "error"
    flavours: tuple[Flavour, ...] = FLAVOURS
    since: Version = (0, 0)
    before: Version | None = None
    architectures: tuple[int, ...] = ()
    warns_on: tuple[Flavour, ...] = ()

    def holds(self, target: Target) -> bool:
        """Whether the rule is about this target."""
        if target.flavour not in self.flavours or target.version < self.since:
            return False
        if self.before is not None and target.version >= self.before:
            return False
        return not self.architectures or any(
            each in self.architectures for each in target.architectures
        )

    def findings(self, graph: Graph, target: Target) -> Iterator[Finding]:
        """What the rule has against one graph."""
        severity = "warning" if target.flavour in self.warns_on else self.severity
        for node, message in self.check(graph, target):
            place = (node.label, node.op, node.source) if node is not None else ("", "", "")
            yield Finding(self.name, severity, message, *place)


RULES: dict[str, Rule] = {}

NodeCheck: TypeAlias = Callable[[Node, Target], Iterable[str]]
GraphCheck: TypeAlias = Callable[[Graph, Target], Iterable[Complaint]]


class Where(TypedDict, total=False):
    """Where a rule holds, and how much it weighs; see Rule."""

    severity: Severity
    flavours: tuple[Flavour, ...]
    since: Version
    before: Version | None
    architectures: tuple[int, ...]
    warns_on: tuple[Flavour, ...]


def node_rule(*kinds: str, source: str, **where: Unpack[Where]) -> Callable[[NodeCheck], NodeCheck]:
    """Register a function (node, target) -> sentences, for nodes of these kinds (or of every)."""

    def add(check: NodeCheck) -> NodeCheck:
        def over(graph: Graph, target: Target) -> Iterator[Complaint]:
            for node in graph.nodes if not kinds else graph.of_kind(*kinds):
                for message in check(node, target):
                    yield node, message

        _add(Rule(*_named(check), source, over, **where))
        return check

    return add


def graph_rule(*, source: str, **where: Unpack[Where]) -> Callable[[GraphCheck], GraphCheck]:
    """Register a function (graph, target) -> (node or None, sentence) pairs."""

    def add(check: GraphCheck) -> GraphCheck:
        _add(Rule(*_named(check), source, check, **where))
        return check

    return add


def _named(check: Callable[..., object]) -> tuple[str, str]:
    reason = inspect.getdoc(check)
    assert reason, f"the rule {check.__name__} has no docstring to be its reason"
    return check.__name__.replace("_", "-"), reason


def _add(rule: Rule) -> None:
    assert rule.name not in RULES, f"two rules are called {rule.name}"
    RULES[rule.name] = rule
