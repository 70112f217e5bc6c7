"""What TensorRT accepts and then drops or miscomputes: a table of rules.

What its parser and builder refuse is not here: they say so themselves. A row of `RULES` holds a
name, the operators it reads, a condition, a message, and the source of the fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import onnx.defs
from onnx.onnx_ml_pb2 import TensorProto as T

from irc.backends.onnx.graph import COLLECTIVE
from irc.backends.tensorrt.lint.graph import Graph, Node, Shape, Size

Severity: TypeAlias = Literal["error", "warning"]

ANY, GRAPH = "*", "graph"  # values of Rule.operators besides operator names

# Sources that several rows share.
BUILDER = "parser and builder of TensorRT-RTX 1.7.1.116"
_PARSER = "https://github.com/onnx/onnx-tensorrt/blob/main"
IMPORTERS, IMPORTER = f"{_PARSER}/onnxOpImporters.cpp", f"{_PARSER}/ModelImporter.cpp"
ATTENTION, ATTRIBUTES = f"{_PARSER}/AttentionHelpers.cpp", f"{_PARSER}/OnnxAttrs.cpp"
OPERATORS = f"{_PARSER}/docs/TRT_custom_ops.md"
SUBGROUPS = "https://github.com/pytorch/TensorRT/pull/4380 (TensorRT 11.2.1.2)"
PARSED = f"{IMPORTERS}; {BUILDER}"
SHOWN = 5  # places of a group, where not all are asked for


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


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    `operators` are operator names separated by spaces, or `ANY` node: `condition(node)` is then
    falsy, or the value (a tuple of values) of the placeholders of `message`. For `GRAPH`,
    `condition(graph)` yields (node or None, values). `{kind}` is the node's operator. `message`
    reads "fault; what to do".
    """

    name: str
    operators: str
    source: str
    condition: Callable[..., Any]
    message: str
    severity: Severity = "error"

    def findings(self, graph: Graph) -> Iterator[Finding]:
        """The faults of one graph by this row."""
        for node, values in self._faults(graph):
            place = (node.label, node.op, node.source) if node is not None else ("", "", "")
            fields = values if isinstance(values, tuple) else (values,)
            message = self.message.format(*fields, kind=node.kind if node is not None else "")
            yield Finding(self.name, self.severity, message, *place)

    def _faults(self, graph: Graph) -> Iterator[tuple[Node | None, Any]]:
        if self.operators == GRAPH:
            yield from self.condition(graph)
            return
        nodes = graph.nodes if self.operators == ANY else graph.of_kind(*self.operators.split())
        yield from ((node, values) for node in nodes if (values := self.condition(node)))


# -- attention

_ATTRIBUTES = (  # of TRT_Attention
    *("causal_kind", "query_form", "kv_form", "TRT_normalization_op", "TRT_decomposable"),
    "nb_rank",
)
_INSTEAD = {
    "scale": "multiply the query by it first",
    "is_causal": 'write causal_kind "upper_left" or "lower_right"',
    "decomposable": "write TRT_decomposable",
    "normalization_op": "write TRT_normalization_op",
}


def _tokens(node: Node, i: int) -> Size:
    """The number of queries or keys of operand i: [B, H, S, D] or [B, S, H*D]."""
    shape = node.shape(i)
    return shape[-2] if shape is not None and len(shape) in (3, 4) else None


def _unaligned(node: Node) -> tuple[Size, Size] | None:
    counts = _tokens(node, 0), _tokens(node, 1)
    differs = None not in counts and counts[0] != counts[1]
    return counts if differs and node.get("is_causal", 0) else None


def _unknown_attribute(node: Node) -> tuple[str, str] | None:
    for name in node.attributes:
        if name not in _ATTRIBUTES:
            return name, _INSTEAD.get(name, "leave it out")
    return None


def _bad_lengths(node: Node) -> str:
    """What is wrong with the length inputs 4 (packed queries) and 5 (keys)."""
    if any(map(node.has, range(6, len(node.inputs)))):
        return "inputs after 5 are ignored"
    if node.has(4) and node.get("query_form", "padded_bhnd") == "padded_bhnd":
        return "input 4 holds offsets of packed queries, and these queries are padded"
    for i in (4, 5):
        if node.has(i) and node.dtype(i) not in (0, T.INT32, T.INT64):
            return f"input {i} holds lengths and is neither int32 nor int64"
    return ""


# -- quantized values


def _shown(shape: Shape) -> str:
    return "unknown" if shape is None else str(list(shape)).replace("'", "")


def _bad_blocks(node: Node) -> tuple[int, str, str] | None:
    values, scales, size = node.shape(0), node.shape(1), node.get("block_size", 0)
    if not size or values is None or scales is None:
        return None
    axis = node.get("axis", 1) % (len(values) or 1)
    blocks = [v if i != axis or not isinstance(v, int) else v / size for i, v in enumerate(values)]
    sizes = zip(blocks, scales, strict=False)
    differ = any(n != m for n, m in sizes if not isinstance(n, str | None) and isinstance(m, int))
    return (size, _shown(values), _shown(scales)) if differ or len(scales) != len(values) else None


# -- names, types and groups

_ONNX = ("", "ai.onnx")  # the domain of ONNX's own operators
_FOREIGN = ("com.microsoft", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")
# Operators of com.microsoft whose importers read what that domain defines.
_MICROSOFT = (
    *("MultiHeadAttention", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"),
    *("Gelu", "QuantizeLinear", "DequantizeLinear"),
)
_STANDARD = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
_PLUGIN = ("plugin_version", "plugin_namespace")
_INT32 = range(-(2**31), 2**31)


def _is_builtin_name(node: Node) -> bool:
    """Whether a node of another domain is parsed as the ONNX operator of its name."""
    if node.domain in _ONNX or node.kind not in _STANDARD:
        return False
    if "plugin_namespace" in node.attributes:  # then a plugin of that name takes precedence
        return False
    return node.domain != "com.microsoft" or node.kind not in _MICROSOFT


def _is_plugin(node: Node) -> bool:
    """Whether the parser looks for a plugin of the node's name."""
    if any(name in node.attributes for name in _PLUGIN):
        return True
    is_own = node.kind.startswith("TRT_") or node.kind in (COLLECTIVE, *_MICROSOFT)
    return not is_own and node.kind not in _STANDARD and node.domain not in _FOREIGN


def _large_integer(node: Node) -> tuple[str, int] | None:
    for name, field in node.attributes.items() if _is_plugin(node) else ():
        for value in (field.i, *field.ints):
            if value not in _INT32:
                return name, value
    return None


def _doubles(graph: Graph) -> Iterator[tuple[Node | None, str]]:
    for node in graph.of_kind("Cast"):
        if node.get("to", 0) == T.DOUBLE:
            yield node, "the result"
    for value in (*graph.proto.input, *graph.proto.initializer):
        if graph.tensor(value.name).dtype == T.DOUBLE:
            yield None, value.name


def _subgroups(graph: Graph) -> Iterator[tuple[Node, list[int]]]:
    """Nodes whose group is smaller than the largest one, which is taken for the communicator."""
    nodes = list(graph.of_kind(COLLECTIVE))
    groups = [node.get("groups", []) or list(range(node.get("nb_rank", 1))) for node in nodes]
    world = list(range(max(map(len, groups), default=0)))
    yield from ((node, group) for node, group in zip(nodes, groups, strict=True) if group != world)


def _untyped(graph: Graph) -> Iterator[tuple[None, str]]:
    if graph.trouble:
        yield None, graph.trouble.strip()


_ROWS: dict[tuple[str, str, str], tuple[Any, ...]] = {
    ("attention-valid-lengths", "Attention", ATTENTION): (
        lambda node: node.has(6),
        "the parser drops nonpad_kv_seqlen (input 6), so that padding is attended to; write "
        "TRT_Attention with the lengths as input 5, and causal_kind lower_right if causal",
    ),
    ("attention-causal-alignment", "Attention", ATTENTION): (
        _unaligned,
        "is_causal aligns the first of {} queries with the first of {} keys; in a decoder "
        "write TRT_Attention with causal_kind lower_right",
        "warning",
    ),
    ("trt-attention-attributes", "TRT_Attention", OPERATORS): (
        _unknown_attribute,
        "TRT_Attention has no attribute {} and ignores it without an error; {}",
    ),
    ("trt-attention-lengths", "TRT_Attention", OPERATORS): (
        _bad_lengths,
        "{}; pass the valid lengths of keys as input 5, in int32, and leave input 4 empty",
    ),
    ("block-shape", "QuantizeLinear DequantizeLinear", PARSED): (
        _bad_blocks,
        "blocks of {} do not divide values {} into scales {}; divide only the axis, evenly, "
        "and shard it between blocks",
    ),
    ("builtin-name", ANY, IMPORTER): (
        _is_builtin_name,
        "the parser ignores domains and reads this node as the {kind} of ONNX; rename it",
    ),
    ("plugin-integers", ANY, f"{ATTRIBUTES}; {BUILDER}: 2^40 arrives as 0"): (
        _large_integer,
        "{} is {}, and the plugin gets only 32 bits of it; write it as a string",
    ),
    ("double", GRAPH, f"{BUILDER}: DOUBLE is converted to FLOAT"): (
        _doubles,
        "{} is float64, which silently becomes float32; make it float32 if that is enough",
        "warning",
    ),
    ("collective-subgroup", GRAPH, SUBGROUPS): (
        _subgroups,
        "the group {} is not all ranks of the engine, and TensorRT takes all of them; use the "
        "plugin IrcCollective",
    ),
    ("untyped", GRAPH, "shape inference of ONNX"): (
        _untyped,
        "ONNX cannot infer the types: {}; export the model again",
        "warning",
    ),
}
RULES = {head[0]: Rule(*head, *row) for head, row in _ROWS.items()}


# -- reports


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
    places: dict[tuple[Severity, str], list[str]] = {}
    for finding in findings:
        key = (finding.severity, f"[{finding.rule}] {finding.message}")
        here = places.setdefault(key, [])
        if finding.node:
            parts = (finding.source, finding.op or finding.node)
            here.append("  ".join(part for part in parts if part))
    return [Group(*key, tuple(here)) for key, here in places.items()]


def notes(findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Sentences about models by name, one for all models that share a group."""
    models: dict[Group, list[str]] = {}
    for name, findings_of_model in findings.items():
        for group in grouped(findings_of_model):
            models.setdefault(group, []).append(name)
    sentences: list[str] = []
    for group, names in models.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        first = f"{', '.join(names[:2])}{more}: {group.severity} {group.sentence}"
        sentences.append("\n    ".join([first, *group.lines()]))
    return sentences
