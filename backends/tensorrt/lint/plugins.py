"""Rules about plugin nodes: how the parser passes attributes, and which plugins are registered."""

from __future__ import annotations

from irc.backends.tensorrt.lint.graph import Node
from irc.backends.tensorrt.lint.known import FOREIGN, IMPORTED, ONNX, UNSUPPORTED
from irc.backends.tensorrt.lint.rules import ANY, BUILDER, Where, table
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.backends.tensorrt.plugins import find
from irc.errors import Error

_ATTRIBUTES = "https://github.com/onnx/onnx-tensorrt/blob/main/OnnxAttrs.cpp"
_OWN = ("plugin_version", "plugin_namespace")
_INT32 = range(-(2**31), 2**31)


def is_plugin(node: Node) -> bool:
    """Whether a node is marked as a plugin's."""
    return any(name in node.attributes for name in _OWN)


def _looked_up(node: Node) -> bool:
    """Whether the parser looks for a plugin of the node's name."""
    if node.kind == "Constant":
        return False
    known = node.kind in IMPORTED or (node.domain in ONNX and node.kind in UNSUPPORTED)
    return is_plugin(node) or not (known or node.domain in FOREIGN)


def _large_integer(node: Node) -> tuple[str, int] | None:
    for name, field in node.attributes.items() if _looked_up(node) else ():
        for value in (field.i, *field.ints):
            if value not in _INT32:
                return name, value
    return None


def _unknown(node: Node) -> str:
    if node.kind == COLLECTIVE_PLUGIN or not _looked_up(node):
        return ""
    namespace = node.get("plugin_namespace", node.domain)
    try:
        find(node.kind, node.get("plugin_version", "1"), namespace)
    except Error as error:
        return error.message
    return ""


RULES = table(
    {
        ("plugin-integers", ANY, f"{_ATTRIBUTES}; {BUILDER}: 2^40 arrives as 0"): (
            _large_integer,
            "{} is {}, and the plugin gets only 32 bits of it; write it as a string",
        ),
        ("unknown-plugin", ANY, f"{BUILDER}: Plugin not found"): (
            _unknown,
            "the parser looks for a plugin and finds none: {}",
            Where(warns_on=("tensorrt",)),
        ),
    }
)
