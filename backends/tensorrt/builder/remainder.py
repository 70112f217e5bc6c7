"""The part of an ONNX graph that is left when some nodes are taken out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remainder:
    """A model without some nodes; `numbers` are the places its nodes have in the whole one."""

    data: bytes
    numbers: tuple[int, ...]


def without(data: bytes, removed: set[int]) -> Remainder | None:
    """The model without these nodes, whose results become inputs of it.

    What follows from a value of unknown type goes with them. None where nothing is left.
    """
    from onnx.onnx_ml_pb2 import ModelProto, ValueInfoProto

    proto: Any = ModelProto()
    proto.ParseFromString(data)
    graph = proto.graph
    types = {value.name: value for value in (*graph.value_info, *graph.output)}
    given: dict[str, ValueInfoProto] = {}
    lost: set[str] = set()
    kept: list[int] = []
    for i, node in enumerate(graph.node):
        if i not in removed and not lost.intersection(node.input):
            kept.append(i)
            continue
        for name in filter(None, node.output):
            if i in removed and name in types and types[name].type.tensor_type.elem_type:
                given[name] = types[name]
            else:
                lost.add(name)
    if not kept:
        return None
    nodes = [graph.node[i] for i in kept]
    inputs = [*graph.input, *given.values()]
    made = {name for node in nodes for name in node.output}
    outputs = [value for value in graph.output if value.name in made]
    del graph.input[:], graph.output[:], graph.node[:]
    graph.input.extend(inputs)
    graph.node.extend(nodes)
    graph.output.extend(outputs)
    return Remainder(proto.SerializeToString(), tuple(kept))
