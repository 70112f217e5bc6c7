"""Divides a rank's model at its collectives into segments, which ONNX Runtime runs.

Nodes keep their order, so a segment is the nodes between two collectives. A value that depends on
initializers alone is computed in every segment that uses it, rather than passed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from onnx.onnx_ml_pb2 import ModelProto, NodeProto, TensorProto, ValueInfoProto

from irc.backends.onnx.graph import COLLECTIVE
from irc.backends.ranks.communicator import CollectiveCall


@dataclass(frozen=True)
class Collective:
    """One node between segments: `call` on the value `operand` gives the value `result`."""

    call: CollectiveCall
    operand: str
    result: str


@dataclass
class Segment:
    """Nodes without a collective, and the values that they use and compute for others."""

    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    inputs: list[str] = field(default_factory=list[str])
    outputs: list[str] = field(default_factory=list[str])


def divide(model: ModelProto) -> list[Segment | Collective]:
    """The steps of a model in order, without those that no output depends on."""
    constants = _Constants(model)
    steps: list[Segment | Collective] = [Segment()]
    for node in model.graph.node:
        last = steps[-1]
        if node.op_type == COLLECTIVE:
            steps += [_collective(node), Segment()]
        elif isinstance(last, Segment) and node.output[0] not in constants.nodes:
            last.nodes.append(node)
    needed = dict.fromkeys(output.name for output in model.graph.output)
    kept: list[Segment | Collective] = []
    for step in reversed(steps):
        if isinstance(step, Segment):
            _wire(step, needed, constants)
            kept += [step] if step.nodes else []
        elif step.result in needed:
            del needed[step.result]
            needed[step.operand] = None
            kept.append(step)
    return kept[::-1]


def _collective(node: NodeProto) -> Collective:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    lines = [entry.value for entry in node.metadata_props if entry.key == "loc"]
    call = CollectiveCall(
        attributes["collective_operation"].s.decode(),
        attributes["reduce_op"].s.decode(),
        tuple(attributes["groups"].ints),
        attributes["root"].i,
        f"{node.name} ({lines[0]})" if lines else node.name,
    )
    return Collective(call, node.input[0], node.output[0])


class _Constants:
    """The nodes that depend on no input, by their outputs, in order."""

    def __init__(self, model: ModelProto) -> None:
        self.weights = {tensor.name for tensor in model.graph.initializer}
        self.nodes: dict[str, int] = {}
        self._all = list(model.graph.node)
        for i, node in enumerate(self._all):
            constant = (not n or n in self.weights or n in self.nodes for n in node.input)
            if node.op_type != COLLECTIVE and all(constant):
                self.nodes |= dict.fromkeys(node.output, i)

    def behind(self, names: Iterable[str]) -> list[NodeProto]:
        """The nodes that compute these values, in order."""
        numbers: set[int] = set()
        waiting = [self.nodes[name] for name in names if name in self.nodes]
        while waiting:
            at = waiting.pop()
            if at not in numbers:
                numbers.add(at)
                waiting += [self.nodes[n] for n in self._all[at].input if n in self.nodes]
        return [self._all[i] for i in sorted(numbers)]


def _wire(segment: Segment, needed: dict[str, None], constants: _Constants) -> None:
    """Find inputs and outputs of a segment; `needed`: the values used after it, then before it."""
    segment.nodes = required_by(needed, segment.nodes)
    used = dict.fromkeys(name for node in segment.nodes for name in node.input if name)
    fixed = [name for name in needed if name in constants.nodes]
    segment.nodes = [*constants.behind([*used, *fixed]), *segment.nodes]
    computed = dict.fromkeys(name for node in segment.nodes for name in node.output)
    segment.outputs = [name for name in computed if name in needed]
    segment.inputs = [n for n in used if n not in computed and n not in constants.weights]
    for name in segment.outputs:
        del needed[name]
    needed |= dict.fromkeys(segment.inputs)


def required_by(needed: Iterable[str], nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes that these values depend on, in order."""
    wanted, kept = set(needed), list[NodeProto]()
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]


def model_of(segment: Segment, whole: ModelProto, types: dict[str, ValueInfoProto]) -> ModelProto:
    """The model of one segment of a model; `types` has the types of its inputs and outputs."""
    model = ModelProto(ir_version=whole.ir_version, producer_name=whole.producer_name)
    model.opset_import.extend(whole.opset_import)
    graph = model.graph
    graph.name = whole.graph.name
    graph.node.extend(segment.nodes)
    used = {name for node in segment.nodes for name in node.input} | set(segment.outputs)
    weights: list[TensorProto] = [t for t in whole.graph.initializer if t.name in used]
    graph.initializer.extend(weights)
    graph.input.extend(types[name] for name in segment.inputs)
    graph.output.extend(types[name] for name in segment.outputs)
    inside = {name for node in segment.nodes for name in node.output} - set(segment.outputs)
    graph.value_info.extend(types[name] for name in sorted(inside) if name in types)
    return model


def types_of(model: ModelProto) -> dict[str, ValueInfoProto]:
    """The type of every value, from shape inference where the model has none."""
    import onnx.shape_inference

    from irc.backends.onnx.schema import register_schema

    register_schema()
    inferred = onnx.shape_inference.infer_shapes(model).graph
    graph = model.graph
    every = (*inferred.value_info, *graph.value_info, *graph.input, *graph.output)
    return {value.name: value for value in every}
