"""A model as the rules read it: nodes with the types of their operands, constants, producers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from onnx import helper, numpy_helper
from onnx.onnx_ml_pb2 import AttributeProto, GraphProto, NodeProto, TensorProto

from irc.errors import Error

Size: TypeAlias = int | str | None  # of a dimension: known, symbolic, unknown
Shape: TypeAlias = tuple[Size, ...] | None
_Value = TypeVar("_Value", int, float, str, list[int])
_LARGEST = 1 << 24  # elements of a constant that rules read
_LINE = re.compile(r'File "([^"]+)", line (\d+)')  # in the stack traces that torch exports


@dataclass(frozen=True)
class Tensor:
    """The type of a value; dtype 0 (undefined) and shape None are unknown."""

    dtype: int = TensorProto.UNDEFINED
    shape: Shape = None


_UNKNOWN = Tensor()


class Node:
    """One ONNX node within its graph. Operands count from 0; an absent one is called ""."""

    def __init__(self, proto: NodeProto, graph: Graph) -> None:
        self.proto, self.graph = proto, graph
        self.kind, self.domain = proto.op_type, proto.domain
        self.inputs, self.outputs = list(proto.input), list(proto.output)
        self.attributes = {each.name: each for each in proto.attribute}

    def input(self, i: int) -> str:
        """The name of operand i, "" where it is absent."""
        return self.inputs[i] if i < len(self.inputs) else ""

    def has(self, i: int) -> bool:
        """Whether operand i is present."""
        return bool(self.input(i))

    def dtype(self, i: int) -> int:
        """The element type of operand i."""
        return self.graph.tensor(self.input(i)).dtype

    def dtypes(self) -> set[int]:
        """The element types of all operands and results."""
        return {self.graph.tensor(name).dtype for name in (*self.inputs, *self.outputs) if name}

    def shape(self, i: int) -> Shape:
        """The shape of operand i."""
        return self.graph.tensor(self.input(i)).shape

    def constant(self, i: int) -> np.ndarray | None:
        """The numbers of operand i, where it is a constant that can be read."""
        return self.graph.constant(self.input(i)) if self.has(i) else None

    def is_constant(self, i: int) -> bool:
        """Whether operand i is part of the model, readable or not."""
        return self.has(i) and self.graph.find_constant(self.input(i)) is not None

    def producer(self, i: int) -> Node | None:
        """The node that computes operand i."""
        return self.graph.producers.get(self.input(i))

    @property
    def output(self) -> str:
        """The name of the first output; "" for a damaged node without one."""
        return self.outputs[0] if self.outputs else ""

    def users(self) -> list[Node]:
        """The nodes that use the first output."""
        return self.graph.consumers.get(self.output, []) if self.output else []

    def get(self, name: str, default: _Value) -> _Value:
        """An attribute; the default where it is absent or of another kind than the default."""
        found: Any = None
        with suppress(ValueError):  # a damaged attribute
            if name in self.attributes:
                found = helper.get_attribute_value(self.attributes[name])
        found = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
        is_same_kind: bool = type(found) is type(default)
        return found if is_same_kind else default

    @property
    def label(self) -> str:
        """The name of the node, or its kind and first output."""
        return self.proto.name or f"{self.kind} of {self.output}"

    @property
    def op(self) -> str:
        """The scope and name of the IR operation, as irc writes them; "" for other exporters."""
        end, name = f"/{self.kind}.{self.output}", self.proto.name
        return name.removesuffix(end) if self.output and name.endswith(end) else ""

    @property
    def source(self) -> str:
        """`file:line` of the model script, where the exporter recorded it."""
        notes = {each.key: each.value for each in self.proto.metadata_props}
        if "loc" in notes:
            return notes["loc"]
        lines = _LINE.findall(notes.get("pkg.torch.onnx.stack_trace", ""))
        return ":".join(lines[-1]) if lines else ""


@dataclass
class Graph:
    """The main graph of a model, or one inside a node (`outer` is the graph of that node).

    Local functions are inlined. `trouble` is why type inference failed, "" if it did not. `folders`
    may hold external data.
    """

    proto: GraphProto
    tensors: Mapping[str, Tensor]
    initializers: Mapping[str, TensorProto]
    trouble: str = ""
    folders: tuple[Path, ...] = ()
    outer: Graph | None = None
    nodes: list[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = [Node(proto, self) for proto in self.proto.node]

    def all(self, types: Iterator[Mapping[str, Tensor]]) -> Iterator[Graph]:
        """This graph, and those inside its nodes, whose own `types` follow in the same order."""
        yield self
        for node in self.nodes:
            for proto in inner_graphs(node.proto):
                own = {each.name: each for each in proto.initializer}
                tensors = {**self.tensors, **next(types)}
                inner = replace(self, proto=proto, tensors=tensors, initializers=own, outer=self)
                yield from inner.all(types)

    def of_kind(self, *kinds: str) -> Iterator[Node]:
        """The nodes whose op_type is one of `kinds`, in any domain."""
        return (node for node in self.nodes if node.kind in kinds)

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
        """The nodes that use a value; a use in an inner graph counts for the node around it."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys((*node.inputs, *_names_inside(node.proto))):
                if name:
                    found.setdefault(name, []).append(node)
        return found

    def tensor(self, name: str) -> Tensor:
        """The type of a value."""
        return self.tensors.get(name, _UNKNOWN)

    def constant(self, name: str) -> np.ndarray | None:
        """The numbers of a constant, where they can be read and are not too many."""
        found = self.find_constant(name)
        if found is None or int(np.prod(found.dims, dtype=np.int64)) > _LARGEST:
            return None
        if found.data_location != TensorProto.EXTERNAL:
            return _numbers(found)
        where = {each.key: each.value for each in found.external_data}
        for folder in self.folders:
            if (folder / where.get("location", "")).is_file():
                return _numbers(found, str(folder))
        return None

    def find_constant(self, name: str) -> TensorProto | None:
        """The tensor of an initializer or Constant node, None for other values."""
        if name in self.initializers:
            return self.initializers[name]
        node = self.producers.get(name)
        if node is None:
            return self.outer.find_constant(name) if self.outer is not None else None
        value = node.attributes.get("value")
        return value.t if node.kind == "Constant" and value is not None else None


def _numbers(proto: TensorProto, folder: str = "") -> np.ndarray:
    """The numbers of a tensor; an Error where its bytes do not fit its shape."""
    try:
        return numpy_helper.to_array(proto, folder)
    except (ValueError, TypeError, KeyError) as error:
        raise Error(f"the tensor {proto.name!r} is damaged ({error}); export it again") from error


def _names_inside(proto: NodeProto) -> Iterator[str]:
    """The values that the graphs inside a node use, their own among them."""
    for graph in inner_graphs(proto):
        for node in graph.node:
            yield from node.input
            yield from _names_inside(node)
        yield from (each.name for each in graph.output)


def scopes(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph, and those inside its nodes."""
    yield graph
    for node in graph.node:
        for inner in inner_graphs(node):
            yield from scopes(inner)


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


def element_count(shape: Iterable[Size] | None) -> int | None:
    """The number of elements of a shape, None where a size is not known."""
    sizes = [None] if shape is None else list(shape)
    known = [size for size in sizes if isinstance(size, int)]
    return int(np.prod(known, dtype=np.int64)) if len(known) == len(sizes) else None


def differ(a: float | str | None, b: float | str | None) -> bool:
    """Whether two sizes are known and not the same."""
    return isinstance(a, (int, float)) and isinstance(b, (int, float)) and a != b
