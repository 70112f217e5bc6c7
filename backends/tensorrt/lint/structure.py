"""Rules about the file itself: how its names fit together, and where its data lies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from onnx.onnx_ml_pb2 import NodeProto, TensorProto

from irc.backends.tensorrt.lint.graph import Graph, Node, inner_graphs
from irc.backends.tensorrt.lint.rules import BUILDER, Complaint, graph_rule
from irc.backends.tensorrt.target import Target
from irc.interchange import leaves_folder, wiring

_AGAIN = "export the model again"


@graph_rule(source=f"{BUILDER}: 'Failed to sort the model topologically', 'was not registered'")
def malformed(graph: Graph, target: Target) -> Iterator[Complaint]:
    """A graph is not read where names are missing, are two values' or go round in a circle."""
    given = [*graph.inputs, *graph.initializers, *_sparse(graph)]
    if graph.outer is not None:
        given += [name for name in _free(graph) if name not in given]
    nodes = [([*node.inputs, *_inside(node.proto)], node.outputs) for node in graph.nodes]
    found = wiring(given, nodes)
    for i, name in found.lost:
        yield graph.nodes[i], f"it takes the value {name!r}, which nothing makes; {_AGAIN}"
    for i, name in found.twice:
        node = graph.nodes[i] if i >= 0 else None
        yield node, f"two values of the graph are called {name!r}; {_AGAIN}"
    if found.circle:
        first = next(node for node in graph.nodes if found.circle[0] in node.outputs)
        circle = ", ".join(map(repr, found.circle[:5]))
        yield first, f"the values {circle} depend on each other in a circle; {_AGAIN}"
    made = {name for _, outputs in nodes for name in outputs}.union(given)
    for name in graph.outputs if graph.outer is None else ():
        if name not in made:
            yield None, f"nothing makes the result {name!r}; {_AGAIN}"


def _sparse(graph: Graph) -> Iterator[str]:
    yield from (each.values.name for each in graph.proto.sparse_initializer)


def _inside(proto: NodeProto) -> Iterator[str]:
    """The values that the graphs of a node take from outside."""
    for graph in inner_graphs(proto):
        own = {each.name for each in (*graph.input, *graph.initializer)}
        own |= {name for node in graph.node for name in node.output}
        for node in graph.node:
            yield from (name for name in (*node.input, *_inside(node)) if name not in own)
        yield from (each.name for each in graph.output if each.name not in own)


def _free(graph: Graph) -> Iterator[str]:
    """What a graph within a node takes from outside; the graph around it says what is missing."""
    made = {name for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        yield from (name for name in (*node.inputs, *_inside(node.proto)) if name not in made)


@graph_rule(source=f"{BUILDER}: 'Failed to import initializer'; ONNX: external data")
def missing_data(graph: Graph, target: Target) -> Iterator[Complaint]:
    """External data that is not there, or lies outside the model's folder, is not read."""
    for proto in graph.initializers.values() if graph.folders else ():
        yield from ((None, text) for text in _misplaced(proto, graph.folders))
    for node in graph.of_kind("Constant") if graph.folders else ():
        yield from _of_constant(node)


def _of_constant(node: Node) -> Iterator[Complaint]:
    value = node.attributes.get("value")
    if value is not None:
        yield from ((node, text) for text in _misplaced(value.t, node.graph.folders))


def _misplaced(proto: TensorProto, folders: tuple[Path, ...]) -> Iterator[str]:
    """What is wrong with the place of a tensor's data."""
    if proto.data_location != TensorProto.EXTERNAL:
        return
    where = {each.key: each.value for each in proto.external_data}
    location = where.get("location", "")
    say = partial("the data of {!r} {}; {}".format, proto.name)
    if not location:
        yield say("lies in no file", _AGAIN)
        return
    if leaves_folder(location):
        yield say(f"lies in {location!r}, outside the model's folder", "put it beside the model")
        return
    path = next((folder / location for folder in folders if (folder / location).is_file()), None)
    if path is None:
        yield say(f"should be in {folders[0] / location}", "put the file there")
        return
    places = [where.get(key, "") or "0" for key in ("offset", "length")]
    if not all(place.isdecimal() for place in places):
        yield say(f"lies at {' + '.join(places)}, which is no place in a file", _AGAIN)
    elif sum(map(int, places)) > path.stat().st_size:
        yield say(f"reaches beyond the end of {path}", "copy the whole file, or export again")
