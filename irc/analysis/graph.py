"""A module as a graph of networkx, for analyses that are graph algorithms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..ir.core import Function, Module, Value
from ..text.printer import names_of
from .stages import stage_of

if TYPE_CHECKING:
    import networkx

    Graph = networkx.DiGraph[Any]


def to_networkx(module: Module) -> Graph:
    """The directed graph of a module, along which data flows: see Module.to_networkx."""
    import networkx

    graph: Graph = networkx.DiGraph(name=module.name)
    stages = {op.attributes["callee"]: stage_of(op) for op in module.ops() if op.opname == "call"}
    for weight in module.weights.values():
        _add_value(graph, weight, f"@{weight.name}", "weight")
    for function in module.functions.values():
        _add_function(graph, function, stages.get(function, -1))
    return graph


def _add_value(graph: Graph, value: Value, name: str, kind: str, **more: Any) -> None:
    type = value.type
    words = {"dtype": type.dtype, "shape": type.shape, "type": str(type)}
    graph.add_node(value, kind=kind, name=name, **words, **more)


def _add_function(graph: Graph, function: Function, stage: int) -> None:
    place, names = {"function": function.name, "stage": stage}, names_of(function)
    for arg in function.args:
        _add_value(graph, arg, names[arg], "argument", **place)
    for op in function:
        scope, source = (op.loc.scope, op.loc.where()) if op.loc is not None else ("", "")
        words = place if stage_of(op) < 0 else place | {"stage": stage_of(op)}
        graph.add_node(
            op,
            kind="operation",
            name=op.opname,
            attributes=op.attributes,
            scope=scope,
            source=source,
            **words,
        )
        for result in op.results:
            _add_value(graph, result, names[result], "value", scope=scope, **words)
            graph.add_edge(op, result)
        for name, value in op.named_operands():
            if graph.has_edge(value, op):
                graph.edges[value, op]["operands"] += (name,)
            else:
                graph.add_edge(value, op, operands=(name,))
