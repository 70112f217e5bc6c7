"""Rules about the graph and its operators: names that do not fit together, unknown operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from irc.backends.tensorrt.lint.graph import Graph, Node
from irc.backends.tensorrt.lint.known import (
    FOREIGN,
    IMPORTED,
    MICROSOFT,
    NEED_PLUGINS,
    ONNX,
    STANDARD,
    UNSUPPORTED,
)
from irc.backends.tensorrt.lint.plugins import is_plugin
from irc.backends.tensorrt.lint.rules import ANY, BUILDER, GRAPH, PARSED, WARNING, Where, table
from irc.onnx_format.files import wiring

_DISPATCH = "https://github.com/onnx/onnx-tensorrt/blob/main/ModelImporter.cpp"
_LARGEST_K = 3840


def _unsupported(node: Node) -> tuple[str, str] | None:
    if is_plugin(node):
        return None
    if node.domain in FOREIGN and node.kind not in IMPORTED:
        return f"{node.kind} of {node.domain}", "export with plain ONNX operators"
    if node.domain in ONNX and node.kind in UNSUPPORTED:
        return node.kind, UNSUPPORTED[node.kind]
    return None


def _builtin_name(node: Node) -> bool:
    """Whether a node of another domain is parsed as the ONNX operator of its name."""
    if node.domain in ONNX or node.kind not in STANDARD:
        return False
    if "plugin_namespace" in node.attributes:  # then a plugin of that name takes precedence
        return False
    return node.domain != "com.microsoft" or node.kind not in MICROSOFT


def _k(node: Node) -> int:
    k = node.constant(1)
    return int(k.max()) if k is not None and k.size and int(k.max()) > _LARGEST_K else 0


def _squeezed(node: Node) -> str:
    """The dynamic dimensions that a Squeeze without axes may remove, or ""."""
    if node.has(1) or "axes" in node.attributes:
        return ""
    return ", ".join(each for each in node.shape(0) or () if isinstance(each, str))


_Faults: TypeAlias = Iterator[tuple[Node | None, str | tuple[str, str]]]


def _malformed(graph: Graph, target: object) -> _Faults:
    if graph.outer is not None:  # the names of inner graphs are left to the parser
        return
    known = [*graph.inputs, *graph.initializers]
    known += [each.values.name for each in graph.proto.sparse_initializer]
    found = wiring(known, [(node.inputs, node.outputs) for node in graph.nodes])
    for i, name in found.missing:
        yield graph.nodes[i], f"nothing computes the operand {name!r}"
    for i, name in found.duplicates:
        yield graph.nodes[i] if i >= 0 else None, f"two values are called {name!r}"
    if found.cycle:
        names = ", ".join(map(repr, found.cycle[:5]))
        yield graph.producers[found.cycle[0]], f"the values {names} depend on each other in a cycle"
    for name in graph.outputs:
        if name not in graph.producers and name not in known:
            yield None, f"nothing computes the output {name!r}"


def _unused(graph: Graph, target: object) -> _Faults:
    for name in graph.inputs if graph.outer is None else ():
        if name not in graph.outputs and name not in graph.consumers:
            yield None, name


def _untyped(graph: Graph, target: object) -> _Faults:
    if graph.trouble and graph.outer is None:
        yield None, graph.trouble.strip()


RULES = table(
    {
        ("unsupported-operator", ANY, f"{BUILDER}: supports_operator"): (
            _unsupported,
            "TensorRT has no {}; {}",
        ),
        ("missing-plugin", " ".join(NEED_PLUGINS), f"{BUILDER}: no creator"): (
            lambda node: not is_plugin(node) and NEED_PLUGINS[node.kind],
            "{kind} needs a plugin that TensorRT does not ship, though its parser accepts it; {}",
            Where(warns_on=("tensorrt",)),
        ),
        ("builtin-name", ANY, _DISPATCH): (
            _builtin_name,
            "the parser ignores domains and reads this node as the {kind} of ONNX; rename it",
        ),
        ("topk-limit", "TopK", f"{BUILDER}: ITopKLayer"): (
            _k,
            f"K is {{}}, and TensorRT finds at most {_LARGEST_K}; take fewer, or use two steps",
        ),
        ("squeeze-axes", "Squeeze", f"{BUILDER}: ISqueezeLayer"): (
            _squeezed,
            "without axes, Squeeze removes {} where that is 1, which TensorRT refuses; write axes",
            WARNING,
        ),
        ("scatter-reduction", "ScatterND ScatterElements Scatter", PARSED): (
            lambda node: node.get("reduction", "none") != "none" and node.get("reduction", ""),
            "the reduction {!r} is refused; use OneHot and MatMul, or sum first",
        ),
        ("malformed", GRAPH, f"{BUILDER}: Failed to sort the model"): (
            _malformed,
            "the graph is not valid: {}; export the model again",
        ),
        ("unused-input", GRAPH, f"{BUILDER}: 'Unused Input'"): (
            _unused,
            "no node reads the input {}; remove it",
        ),
        ("untyped", GRAPH, "shape inference of ONNX"): (
            _untyped,
            "ONNX cannot infer the types: {}; export the model again",
            WARNING,
        ),
    }
)
