"""A model as the rules look at it: nodes with their operands' types, constants, producers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
from onnx import numpy_helper
from onnx.onnx_ml_pb2 import AttributeProto, GraphProto, NodeProto, TensorProto

from irc.errors import Error

Size: TypeAlias = int | str | None  # of a dimension: known, symbolic, unknown
LARGEST = 1 << 24  # elements of a constant that rules read

_LINE = re.compile(r'File "([^"]+)", line (\d+)')  # in the stack traces that torch exports


@dataclass(frozen=True)
class Tensor:
    """The type of a value; dtype 0 (undefined) and shape None are not known."""

    dtype: int = TensorProto.UNDEFINED
    shape: tuple[Size, ...] | None = None


UNKNOWN = Tensor()


class Node:
    """One ONNX node within its graph. An operand is counted from 0 and may be absent ("")."""

    def __init__(self, proto: NodeProto, graph: Graph) -> None:
        self.proto, self.graph = proto, graph
        self.kind, self.domain = proto.op_type, proto.domain
        self.inputs, self.outputs = list(proto.input), list(proto.output)
        self.attributes = {each.name: each for each in proto.attribute}

    def input(self, i: int) -> str:
        """The name of operand i, "" where it is absent."""
        return self.inputs[i] if i < len(self.inputs) else ""

    def has(self, i: int) -> bool:
        """Whether operand i is given."""
        return bool(self.input(i))

    def dtype(self, i: int) -> int:
        """The element type of operand i."""
        return self.graph.tensor(self.input(i)).dtype

    def shape(self, i: int) -> tuple[Size, ...] | None:
        """The shape of operand i."""
        return self.graph.tensor(self.input(i)).shape

    def constant(self, i: int) -> np.ndarray | None:
        """The numbers of operand i, where it is a constant that can be read."""
        return self.graph.constant(self.input(i)) if self.has(i) else None

    def is_constant(self, i: int) -> bool:
        """Whether operand i is part of the model, readable or not."""
        return self.has(i) and self.graph.is_constant(self.input(i))

    def producer(self, i: int) -> Node | None:
        """The node that computes operand i."""
        return self.graph.producers.get(self.input(i))

    def users(self, i: int = 0) -> list[Node]:
        """The nodes that take output i."""
        return self.graph.consumers.get(self.outputs[i], []) if i < len(self.outputs) else []

    def number(self, name: str, default: int) -> int:
        """An attribute of kind INT."""
        found = self.attributes.get(name)
        return int(found.i) if found is not None and found.type == AttributeProto.INT else default

    def real(self, name: str, default: float) -> float:
        """An attribute of kind FLOAT."""
        found = self.attributes.get(name)
        return found.f if found is not None and found.type == AttributeProto.FLOAT else default

    @overload
    def text(self, name: str, default: str) -> str: ...
    @overload
    def text(self, name: str, default: None = None) -> str | None: ...
    def text(self, name: str, default: str | None = None) -> str | None:
        """An attribute of kind STRING."""
        found = self.attributes.get(name)
        if found is None or found.type != AttributeProto.STRING:
            return default
        return found.s.decode("utf-8", "replace")

    def numbers(self, name: str) -> list[int]:
        """An attribute of kind INTS, empty where it is absent."""
        found = self.attributes.get(name)
        return list(found.ints) if found is not None else []

    @property
    def label(self) -> str:
        """The name of the node, or its kind and first output."""
        return self.proto.name or f"{self.kind} of {self.outputs[0] if self.outputs else ''}"

    @property
    def op(self) -> str:
        """The scope and name of the IR operation, as irc writes them; "" for other exporters."""
        end = f"/{self.kind}.{self.outputs[0]}" if self.outputs else ""
        name = self.proto.name
        return name.removesuffix(end) if end and name.endswith(end) else ""

    @property
    def source(self) -> str:
        """`file:line` of the model script, where the exporter wrote it."""
        notes = {each.key: each.value for each in self.proto.metadata_props}
        if "loc" in notes:
            return notes["loc"]
        lines = _LINE.findall(notes.get("pkg.torch.onnx.stack_trace", ""))
        return ":".join(lines[-1]) if lines else ""


@dataclass
class Graph:
    """The main graph of a model, or one inside a node (`outer` is the graph of that node).

    `functions` are the (domain, name) of the model's local functions, which stand inlined here;
    `calls` the nodes that called them. `trouble` is why types could not be told.
    """

    proto: GraphProto
    tensors: Mapping[str, Tensor]
    initializers: Mapping[str, TensorProto]
    functions: frozenset[tuple[str, str]] = frozenset()
    calls: tuple[NodeProto, ...] = ()
    trouble: str = ""
    producer: str = ""  # the program that wrote the model
    folders: tuple[Path, ...] = ()  # where external data lies
    outer: Graph | None = None
    nodes: list[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = [Node(proto, self) for proto in self.proto.node]

    def inside(self, proto: GraphProto) -> Graph:
        """A graph in an attribute of one of the nodes."""
        own = {each.name: each for each in proto.initializer}
        return replace(self, proto=proto, initializers=own, calls=(), outer=self)

    @property
    def depth(self) -> int:
        """How many graphs this one lies in."""
        return 0 if self.outer is None else self.outer.depth + 1

    def of_kind(self, *kinds: str) -> Iterator[Node]:
        """The nodes whose op_type is one of `kinds`, whatever their domain, kind by kind."""
        return (node for kind in kinds for node in self._by_kind.get(kind, ()))

    @cached_property
    def _by_kind(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(node.kind, []).append(node)
        return found

    @cached_property
    def inputs(self) -> list[str]:
        """The names of the graph's inputs, without initializers."""
        return [each.name for each in self.proto.input if each.name not in self.initializers]

    @cached_property
    def outputs(self) -> list[str]:
        """The names of the graph's outputs."""
        return [each.name for each in self.proto.output]

    @cached_property
    def producers(self) -> dict[str, Node]:
        """The node of every value that is computed here."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    @cached_property
    def consumers(self) -> dict[str, list[Node]]:
        """The nodes that take a value, inner graphs counted as their node."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys((*node.inputs, *captured(node.proto))):
                if name:
                    found.setdefault(name, []).append(node)
        return found

    def tensor(self, name: str) -> Tensor:
        """The type of a value."""
        return self.tensors.get(name, UNKNOWN)

    def is_constant(self, name: str) -> bool:
        """Whether a value is an initializer or comes from a Constant node."""
        return self._tensor_of(name) is not None

    def constant(self, name: str) -> np.ndarray | None:
        """The numbers of a constant, where they are at hand and not too many."""
        found = self._tensor_of(name)
        if found is None or int(np.prod(found.dims, dtype=np.int64)) > LARGEST:
            return None
        if found.data_location != TensorProto.EXTERNAL:
            return _numbers(found)
        where = {each.key: each.value for each in found.external_data}
        for folder in self.folders:
            if (folder / where.get("location", "")).is_file():
                return _numbers(found, str(folder))
        return None

    def _tensor_of(self, name: str) -> TensorProto | None:
        if name in self.initializers:
            return self.initializers[name]
        node = self.producers.get(name)
        if node is None:
            return self.outer._tensor_of(name) if self.outer is not None else None
        value = node.attributes.get("value")
        return value.t if node.kind == "Constant" and value is not None else None


def _numbers(proto: TensorProto, folder: str = "") -> np.ndarray:
    """The numbers of a tensor; an Error where its bytes are not what its shape says."""
    try:
        return numpy_helper.to_array(proto, folder)
    except (ValueError, TypeError, KeyError) as error:
        raise Error(f"the tensor {proto.name!r} is damaged ({error}); export it again") from error


def captured(proto: NodeProto) -> Iterator[str]:
    """The values that graphs inside a node take from outside (and their own, which is no harm)."""
    for graph in inner_graphs(proto):
        for node in graph.node:
            yield from node.input
            yield from captured(node)
        yield from (each.name for each in graph.output)


def inner_graphs(proto: NodeProto) -> Iterator[GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in proto.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def dtype_name(dtype: int) -> str:
    """`float16` for 10."""
    known = TensorProto.DataType.values()
    return TensorProto.DataType.Name(dtype).lower() if dtype in known else f"type {dtype}"


def known_product(sizes: Any) -> int | None:
    """The product of sizes, None where one is not a number."""
    total = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        total *= size
    return total
