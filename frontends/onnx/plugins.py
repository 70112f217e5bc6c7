"""Nodes of plugins, read as the operations that these name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Node
from irc.frontends.onnx.rules import TABLE, Reading
from irc.ir.core import Op
from irc.ir.declare import REGISTRY

VERSION, NAMESPACE = "plugin_version", "plugin_namespace"


@dataclass(frozen=True)
class Plugin:
    """How the nodes of a plugin are read.

    `operation` is the name of the operation they become, "" for none. `values` gives the fields by
    name from the version and the texts of a node; an Error where these do not fit.
    """

    operation: str
    values: Callable[[str, Mapping[str, str]], Mapping[str, Any]]


Plugins: TypeAlias = Mapping[tuple[str, str], Plugin]  # by namespace and name


def readings(plugins: Plugins) -> dict[tuple[str, str], Reading]:
    """How nodes of plugins are read, by domain and kind, except where the kind is read already."""
    nodes = _Nodes(plugins)
    return {
        (domain, kind): Reading(nodes.rule, None, nodes.refuses)
        for namespace, kind in plugins
        for domain in ("", namespace)
        if (domain, kind) not in TABLE
    }


@dataclass(frozen=True)
class _Nodes:
    plugins: Plugins

    def refuses(self, node: Node) -> str | None:
        """Why a node of a plugin cannot be read, or None."""
        key = _key(node)
        plugin = self.plugins.get(key)
        if plugin is None:
            return f"no plugin of this name is registered in its namespace, {key[0]!r}"
        if not plugin.operation:
            return "its PluginSpec names no operation; give it operation=..."
        if plugin.operation not in REGISTRY:
            return (
                f"its operation {plugin.operation} is declared nowhere; name its file with --load"
            )
        other = [name for name, value in node.attributes.items() if not isinstance(value, str)]
        if other:
            return f"its attribute {other[0]} is no text"
        try:
            self._values(node)
        except Error as error:
            return error.message
        return _miscounted(node, REGISTRY[plugin.operation])

    def rule(self, b: Builder, node: Node) -> Op:
        """The operation: inputs are operands in their order, fields attributes of their names."""
        cls = REGISTRY[self.plugins[_key(node)].operation]
        known = cls.attribute_types
        given = {name: value for name, value in self._values(node).items() if name in known}
        plain = len(node.inputs) if cls.variadic else len(cls.operand_names)
        operands = [b.get(node.input(i)) for i in range(plain)]
        for i, name in enumerate(cls.optional_names, plain):
            entry = node.optional(i)
            given[name] = None if entry is None else b.get(entry)
        positional: list[Any] = [operands] if cls.variadic else operands
        make: Any = cls
        return b.add(make(*positional, **given))

    def _values(self, node: Node) -> Mapping[str, Any]:
        texts = {name: str(value) for name, value in node.attributes.items()}
        version = texts.pop(VERSION, "1")
        texts.pop(NAMESPACE, None)
        return self.plugins[_key(node)].values(version, texts)


def _miscounted(node: Node, cls: type[Op]) -> str | None:
    """That a node has fewer or more inputs than its operation has operands."""
    least = len(cls.operand_names)
    most = least + len(cls.optional_names)
    count = len(node.inputs)
    if cls.variadic or least <= count <= most:
        return None
    operands = f"{least}" if least == most else f"{least} to {most}"
    return f"it has {count} inputs, and its operation {cls.opname} takes {operands}"


def _key(node: Node) -> tuple[str, str]:
    """The namespace, which is the domain unless an attribute says it, and the name."""
    return node.text(NAMESPACE, node.domain), node.kind
