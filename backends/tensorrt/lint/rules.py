"""The row type of the rule table, the finding that reports one fault, and groups of findings.

A row holds a name, the operators it reads, a condition, a message template, and the source of the
fact. The table itself is `RULES` in `__init__.py`; the other modules each hold the rows of a topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from irc.backends.tensorrt.lint.graph import Graph, Node
from irc.backends.tensorrt.target import Flavour, Scope, Target

Severity: TypeAlias = Literal["error", "warning"]

ANY, GRAPH = "*", "graph"  # values of Rule.operators besides operator names

# Sources that several rows share.
BUILDER = "parser and builder of TensorRT-RTX 1.7.1.116"
IMPORTERS = "https://github.com/onnx/onnx-tensorrt/blob/main/onnxOpImporters.cpp"
ATTENTION = "https://github.com/onnx/onnx-tensorrt/blob/main/AttentionHelpers.cpp"
PARSED = f"{IMPORTERS}; {BUILDER}"
LAYERS = f"layer dump of the {BUILDER}"
SHOWN = 5  # places of a group, where not all are asked for
OPERATORS = "https://github.com/onnx/onnx-tensorrt/blob/main/docs/TRT_custom_ops.md"


@dataclass(frozen=True)
class Finding:
    """One fault of a model: `message` names it and what to do.

    `node` is the ONNX node, `op` the scope and name of the IR operation it comes from, `source` the
    line of the model script; "" where not known.
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


@dataclass(frozen=True, kw_only=True)
class Where(Scope):
    """The targets that a row is about, and how severe a finding is: on the flavours in `warns_on`
    an error is a warning, since the fault was not observed there."""

    severity: Severity = "error"
    warns_on: tuple[Flavour, ...] = ()


WARNING = Where(severity="warning")


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    `operators` are operator names separated by spaces, or `ANY` node: `condition(node)` is then
    falsy, or the value (a tuple of values) of the placeholders of `message`. For `GRAPH`,
    `condition(graph, target)` yields (node or None, values). `{kind}` is the node's operator and
    `{target}` the target. `message` reads "fault; what to do".
    """

    name: str
    operators: str
    source: str
    condition: Callable[..., Any]
    message: str
    where: Where = Where()

    def findings(self, graph: Graph, target: Target) -> Iterator[Finding]:
        """The faults of one graph by this row."""
        warns = target.flavour in self.where.warns_on
        severity: Severity = "warning" if warns else self.where.severity
        for node, values in self._found(graph, target):
            place = (node.label, node.op, node.source) if node is not None else ("", "", "")
            found = values if isinstance(values, tuple) else (values,)
            kind = node.kind if node is not None else ""
            message = self.message.format(*found, kind=kind, target=target)
            yield Finding(self.name, severity, message, *place)

    def _found(self, graph: Graph, target: Target) -> Iterator[tuple[Node | None, Any]]:
        if self.operators == GRAPH:
            yield from self.condition(graph, target)
            return
        nodes = graph.nodes if self.operators == ANY else graph.of_kind(*self.operators.split())
        for node in nodes:
            found = self.condition(node)
            if found:
                yield node, found


def table(rows: Mapping[tuple[str, str, str], tuple[Any, ...]]) -> list[Rule]:
    """Rules of (name, operators, source): (condition, message[, where])."""
    return [Rule(*head, *row) for head, row in rows.items()]


@dataclass(frozen=True)
class Group:
    """Findings that differ in place only: `places` are lines and operations, or nodes."""

    severity: Severity
    sentence: str
    places: tuple[str, ...]

    def lines(self, all_places: bool = False) -> list[str]:
        """The places to show, and how many are left out."""
        shown = self.places if all_places else self.places[:SHOWN]
        left = len(self.places) - len(shown)
        return [*shown, *([f"and {left} more; irc lint --all prints them"] if left else [])]


def grouped(findings: Iterable[Finding]) -> list[Group]:
    """The groups, in the order of their first findings."""
    found: dict[tuple[Severity, str], list[str]] = {}
    for each in findings:
        places = found.setdefault((each.severity, f"[{each.rule}] {each.message}"), [])
        if each.node:
            where = (each.source, each.op or each.node)
            places.append("  ".join(place for place in where if place))
    return [Group(*kind, tuple(places)) for kind, places in found.items()]


def notes(findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Sentences about models by name, one for all models that share a group."""
    models: dict[Group, list[str]] = {}
    for name, every in findings.items():
        for group in grouped(every):
            models.setdefault(group, []).append(name)
    return [
        "\n    ".join([f"{_joined(names)}: {group.severity} {group.sentence}", *group.lines()])
        for group, names in models.items()
    ]


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
