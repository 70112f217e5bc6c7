"""Modules in Google's Model Explorer: model-explorer FILE.irc --extensions=irc.model_explorer"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..driver.sources import read_module
from ..ir.core import Function, Module, Value, Weight
from ..text.printer import attributes_text, names_of


def graphs_of(module: Module) -> list[dict[str, Any]]:
    """A graph per function, of nodes nested by scopes; calls lead to the graphs of functions.

    https://github.com/google-ai-edge/model-explorer/wiki/6.-Develop-Adapter-Extension
    """
    return [{"id": each.name, "nodes": [*_nodes(each)]} for each in module.functions.values()]


def _nodes(function: Function) -> Iterator[dict[str, Any]]:
    names, ids = names_of(function), dict[Value, tuple[str, int]]()

    def outputs(node: str, values: Sequence[Value]) -> list[dict[str, Any]]:
        ids.update((value, (node, at)) for at, value in enumerate(values))
        facts = [{"__tensor_tag": names[v], "tensor_shape": str(v.type)} for v in values]
        return [{"id": str(at), "attrs": _pairs(each)} for at, each in enumerate(facts)]

    for arg in function.args:
        yield {"id": names[arg], "label": "input", "outputsMetadata": outputs(names[arg], [arg])}
    for number, op in enumerate(function):
        facts = {"attributes": attributes_text(op).strip()}
        facts |= {"source": op.loc.where()} if op.loc is not None else {}
        edges: list[dict[str, str]] = []
        for at, (role, value) in enumerate(op.named_operands()):
            if isinstance(value, Weight):
                facts[role] = f"@{value.name} {value.type}"
            else:
                source, output = ids[value]
                edge = {"sourceNodeId": source, "sourceNodeOutputId": str(output)}
                edges.append(edge | {"targetNodeInputId": str(at)})
        callee, name = op.attributes.get("callee"), f"{number} {op.opname}"
        yield {
            "id": name,
            "label": op.opname,
            "namespace": op.loc.scope.replace(".", "/") if op.loc is not None else "",
            "attrs": _pairs(facts),
            "incomingEdges": edges,
            "outputsMetadata": outputs(name, op.results),
            "subgraphIds": [callee.name] if isinstance(callee, Function) else [],
        }


def _pairs(facts: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in facts.items() if value]


if find_spec("model_explorer") is not None:
    explorer: Any = import_module("model_explorer")

    class ModuleAdapter(explorer.Adapter):  # pyright: ignore[reportUntypedBaseClass]
        """Reads the text of a module, such as module.irc in an artifact."""

        metadata = explorer.AdapterMetadata("irc", "irc", "modules of irc, as text", "", ["irc"])

        def convert(self, model_path: str, settings: dict[str, Any]) -> dict[str, Any]:
            """The graphs of the module in a file."""
            module = read_module(Path(model_path))
            collection = explorer.graph_builder.GraphCollection(module.name, graphs_of(module))
            return {"graphCollections": [collection]}
