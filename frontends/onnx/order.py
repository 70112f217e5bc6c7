"""Puts the nodes of a graph in an order in which they can run, where a file has another.

ONNX demands the order, but files edited with graphsurgeon and saved without `toposort` lack it. A
graph in order is left alone, because collectives must run in the order that all ranks agree on.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irc.errors import Error
from irc.interchange import wiring

if TYPE_CHECKING:
    from onnx import ModelProto


def in_order(model: ModelProto, path: Path) -> None:
    """Reorder the nodes in place, if they need it; an Error where their names do not fit."""
    graph = model.graph
    initial = [tensor.name for tensor in graph.initializer]
    constant = set(initial)  # which older files also have among the inputs
    inputs = [value.name for value in graph.input if value.name not in constant]
    found = wiring([*inputs, *initial], [(node.input, node.output) for node in graph.node])
    for _, name in found.twice:
        raise Error(f"{path}: two values of the graph are called {name!r}, which ONNX forbids")
    for _, name in found.lost:
        raise Error(f"{path}: nothing makes the value {name!r} that a node takes")
    if found.circle:
        circle = ", ".join(map(repr, found.circle[:5]))
        raise Error(f"{path}: the values {circle} depend on each other in a circle")
    if found.early:
        _sort(model, path)


def _sort(model: ModelProto, path: Path) -> None:
    """By graphsurgeon, which is shown the graph without tensors and metadata, for it loses both."""
    surgeon, logger = _graphsurgeon()
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
        with logger.suppress(logger.CRITICAL + 1):  # what goes wrong is told here
            graph = surgeon.import_onnx(bare)
            places = {id(node): place for place, node in enumerate(graph.nodes)}
            graph.toposort(recurse_subgraphs=False, recurse_functions=False)
    except (surgeon.OnnxGraphSurgeonException, RecursionError):
        raise Error(
            f"{path}: its nodes are in no order in which they can run, and it is too deep to sort "
            "them; save it with its nodes sorted"
        ) from None
    nodes = [model.graph.node[places[id(node)]] for node in graph.nodes]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _graphsurgeon() -> tuple[Any, Any]:
    """The package, and its logger."""
    try:
        surgeon: Any = import_module("onnx_graphsurgeon")
        logger: Any = import_module("onnx_graphsurgeon.logger").G_LOGGER
    except ImportError as error:
        raise Error(
            "the nodes of this file are in no order in which they can run; sorting them needs "
            f"onnx-graphsurgeon ({error}): pip install onnx-graphsurgeon"
        ) from None
    return surgeon, logger
