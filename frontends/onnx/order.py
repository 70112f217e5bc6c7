"""Puts the nodes of a graph in an order in which they can run, where a file has another.

ONNX demands the order, but files edited with graphsurgeon and saved without `toposort` lack it. A
graph in order is left alone, because collectives must run in the order that all ranks agree on.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irc.errors import Error

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto


def in_order(model: ModelProto, path: Path) -> None:
    """Reorder the nodes in place, if they need it; an Error where something is never made."""
    lost = _too_early(model.graph)
    if not lost:
        return
    makers = {name for node in model.graph.node for name in node.output}
    for name in lost:
        if name not in makers:
            raise Error(f"{path}: nothing makes the value {name!r} that a node takes")
    _sort(model, path)
    for name in _too_early(model.graph):
        raise Error(f"{path}: the value {name!r} depends on itself")


def _too_early(graph: GraphProto) -> list[str]:
    """The values that nodes take before they are made."""
    known = {"", *(value.name for value in graph.input)}
    known |= {tensor.name for tensor in graph.initializer}
    lost: list[str] = []
    for node in graph.node:
        lost += [name for name in node.input if name not in known]
        for name in node.output:
            if name and name in known:
                raise Error(f"two values of the graph are called {name!r}, which ONNX forbids")
            known.add(name)
    return lost


def _sort(model: ModelProto, path: Path) -> None:
    """By graphsurgeon, which is shown the graph without tensors and metadata, for it loses both."""
    surgeon = _graphsurgeon()
    bare = type(model)()
    bare.ir_version = model.ir_version
    bare.opset_import.extend(model.opset_import)
    bare.graph.name = "order"
    for node in model.graph.node:
        copy = bare.graph.node.add(op_type=node.op_type, name=node.name)
        copy.input.extend(name for name in node.input if name)
        copy.output.extend(node.output)
    bare.graph.input.extend(model.graph.input)
    try:
        graph = surgeon.import_onnx(bare)
        places = {id(node): place for place, node in enumerate(graph.nodes)}
        graph.toposort(recurse_subgraphs=False, recurse_functions=False)
    except (surgeon.OnnxGraphSurgeonException, RecursionError):
        raise Error(
            f"{path}: its nodes are in no order in which they can run, and sorting them failed: "
            "it has a cycle, or is too deep"
        ) from None
    nodes = [model.graph.node[places[id(node)]] for node in graph.nodes]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _graphsurgeon() -> Any:
    try:
        surgeon: Any = import_module("onnx_graphsurgeon")
        logger: Any = import_module("onnx_graphsurgeon.logger").G_LOGGER
    except ImportError as error:
        raise Error(
            "the nodes of this file are in no order in which they can run; sorting them needs "
            f"onnx-graphsurgeon ({error}): pip install onnx-graphsurgeon"
        ) from None
    logger.severity = logger.CRITICAL
    return surgeon
