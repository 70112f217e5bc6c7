"""Rules about nodes of plugins: how the parser hands attributes over."""

from __future__ import annotations

from collections.abc import Iterator

from onnx.onnx_ml_pb2 import AttributeProto

from irc.backends.tensorrt.lint.graph import Graph, Node
from irc.backends.tensorrt.lint.known import UNSUPPORTED
from irc.backends.tensorrt.lint.operators import FOREIGN, PLUGIN_ATTRIBUTES, is_builtin, is_plugin
from irc.backends.tensorrt.lint.rules import BUILDER, IMPORTERS, Complaint, graph_rule, node_rule
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.backends.tensorrt.plugins import find, plugin_of_node
from irc.backends.tensorrt.target import Target
from irc.errors import Error

_ATTRS = "https://github.com/onnx/onnx-tensorrt/blob/main/OnnxAttrs.cpp"
_INT32 = range(-(2**31), 2**31)
_READABLE = (
    AttributeProto.FLOAT,
    AttributeProto.INT,
    AttributeProto.STRING,
    AttributeProto.FLOATS,
    AttributeProto.INTS,
    AttributeProto.STRINGS,
    AttributeProto.TENSOR,
)


@node_rule(source=f"{IMPORTERS}: importFallbackPluginImporter", severity="warning")
def plugin_version(node: Node, target: Target) -> Iterator[str]:
    """Without plugin_version the parser looks for "1", without plugin_namespace for the domain."""
    if not _of_plugin(node):
        return
    for name in PLUGIN_ATTRIBUTES:
        found = node.attributes.get(name)
        if found is None:
            yield f"{node.kind} is a plugin, and {name} is missing; write it as a text"
        elif found.type != AttributeProto.STRING:
            yield f"{name} is no text; write it as one"


@node_rule(source=f"{_ATTRS}; {BUILDER}: 2^40 arrives as 0")
def plugin_integers(node: Node, target: Target) -> Iterator[str]:
    """Integer fields arrive as int32, whatever they are: larger ones are cut off."""
    if not _of_plugin(node):
        return
    for name, field in node.attributes.items():
        for value in (field.i, *field.ints):
            if value not in _INT32:
                yield f"{name} is {value}, and only 32 bits of it arrive; write it as a text"


@node_rule(source=f"{_ATTRS}; {BUILDER}")
def plugin_fields(node: Node, target: Target) -> Iterator[str]:
    """Tensors cannot be read in Python plugins, graphs and types in none."""
    if not _of_plugin(node):
        return
    for name, field in node.attributes.items():
        if field.type == AttributeProto.TENSOR:
            yield f"{name} is a tensor, which a Python plugin cannot read; make it an input or text"
        elif field.type not in _READABLE:
            yield f"{name} is of a kind that plugins do not get; write it as a text"


@node_rule(source=f"{BUILDER}: Plugin not found", warns_on=("tensorrt",))
def unknown_plugin(node: Node, target: Target) -> Iterator[str]:
    """No plugin of the name is registered, and the parser has nothing, or its own operator, for it.

    Full TensorRT brings plugins of its own.
    """
    if node.kind == COLLECTIVE_PLUGIN or not _of_plugin(node):
        return
    namespace = node.text("plugin_namespace", node.domain)
    try:
        find(node.kind, node.text("plugin_version", "1"), namespace)
    except Error as error:
        yield error.message


@graph_rule(source=f"{BUILDER}: creators are looked up by name and version", severity="warning")
def plugin_versions(graph: Graph, target: Target) -> Iterator[Complaint]:
    """One model uses one version of a plugin."""
    first: dict[tuple[str, str], Node] = {}
    for node in graph.nodes:
        if not _of_plugin(node):
            continue
        key = (node.kind, node.text("plugin_namespace", node.domain))
        before = first.setdefault(key, node)
        here, there = (each.text("plugin_version", "1") for each in (node, before))
        if here != there:
            yield node, f"{node.kind} is used in the versions {there} and {here}; use one of them"


@node_rule(COLLECTIVE_PLUGIN, source="irc.backends.tensorrt.plugins")
def irc_collective(node: Node, target: Target) -> Iterator[str]:
    """The fields of IrcCollective are texts, and fit the operation."""
    try:
        plugin_of_node(node.proto)
    except Error as error:
        yield f"{error.message}; write the fields as the plugin takes them"
        return
    what = node.text("operation", "")
    norm = what == "all_reduce_rms_norm"
    if len(node.inputs) != (3 if norm else 1) or len(node.outputs) != (2 if norm else 1):
        given = f"{len(node.inputs)} inputs and {len(node.outputs)} outputs"
        yield f"{what} has {given}; only all_reduce_rms_norm has more than one: 3 and 2"


def _of_plugin(node: Node) -> bool:
    """Whether the parser looks for a plugin of the node's name."""
    if node.kind == "Constant" or (node.domain, node.kind) in node.graph.functions:
        return False
    if is_plugin(node):
        return True
    known = is_builtin(node) or (node.domain in ("", "ai.onnx") and node.kind in UNSUPPORTED)
    return not known and node.domain not in FOREIGN
