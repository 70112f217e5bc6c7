"""Nodes of plugins, read as the operations that these name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
    reading = Reading(partial(_operation, plugins), None)
    return {
        (domain, kind): reading
        for namespace, kind in plugins
        for domain in ("", namespace)
        if (domain, kind) not in TABLE
    }


def _operation(plugins: Plugins, b: Builder, node: Node) -> Op:
    """The operation: inputs are operands in their order, fields attributes of their names."""
    key = _key(node)
    plugin = plugins.get(key)
    if plugin is None:
        raise Error(f"no plugin of this name is registered in its namespace, {key[0]!r}")
    cls = _class(plugin.operation)
    for name, value in node.attributes.items():
        if not isinstance(value, str):
            raise Error(f"its attribute {name} is no text")
    texts = dict(node.attributes)
    version = texts.pop(VERSION, "1")
    texts.pop(NAMESPACE, None)
    values = plugin.values(version, texts)
    given = {name: value for name, value in values.items() if name in cls.attribute_types}
    count, least = len(node.inputs), len(cls.operand_names)
    most = least + len(cls.optional_names)
    if not cls.variadic and not least <= count <= most:
        takes = f"{least}" if least == most else f"{least} to {most}"
        raise Error(f"it has {count} inputs, and its operation {cls.opname} takes {takes}")
    plain = count if cls.variadic else least
    operands = [b.get(node.input(i)) for i in range(plain)]
    for i, name in enumerate(cls.optional_names, plain):
        entry = node.optional(i)
        given[name] = None if entry is None else b.get(entry)
    make: Any = cls
    return b.add(make(*[operands] if cls.variadic else operands, **given))


def _class(operation: str) -> type[Op]:
    if not operation:
        raise Error("its PluginSpec names no operation; give it operation=...")
    if operation not in REGISTRY:
        raise Error(f"its operation {operation} is declared nowhere; name its file with --load")
    return REGISTRY[operation]


def _key(node: Node) -> tuple[str, str]:
    """The namespace, which is the domain unless an attribute says it, and the name."""
    return node.text(NAMESPACE, node.domain), node.kind
