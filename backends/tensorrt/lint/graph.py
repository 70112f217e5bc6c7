"""A model as the rules read it: nodes with the types of their operands, constants, producers.

Types come from ONNX's own shape inference, on a copy in which operators of TensorRT are replaced by
others of the same types, and weights by inputs, so that none of their bytes are copied. The types
of values behind users' plugins are unknown, unless the model declares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from onnx import helper, shape_inference
from onnx.onnx_ml_pb2 import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    TensorShapeProto,
)

from irc.argument_checks import whole_number_in
from irc.backends.onnx.graph import COLLECTIVE
from irc.backends.onnx.schema import register_schema
from irc.backends.tensorrt.builder import model
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.errors import Error
from irc.ops.collective_names import OPERATIONS

Size: TypeAlias = int | str | None  # of a dimension: known, symbolic, unknown
Shape: TypeAlias = tuple[Size, ...] | None
_Value = TypeVar("_Value", int, float, str, list[int])


@dataclass(frozen=True)
class Tensor:
    """The type of a value; dtype 0 (undefined) and shape None are unknown."""

    dtype: int = TensorProto.UNDEFINED
    shape: Shape = None


_UNKNOWN = Tensor()


class Node(model.Node):
    """One ONNX node within its graph. Operands count from 0."""

    def __init__(self, proto: NodeProto, graph: Graph) -> None:
        super().__init__(proto)
        self.graph, self.domain = graph, proto.domain
        self.attributes = {field.name: field for field in proto.attribute}

    def input(self, i: int) -> str:
        """The name of operand i, "" where it is absent."""
        return self.inputs[i] if i < len(self.inputs) else ""

    def has(self, i: int) -> bool:
        """Whether operand i is present."""
        return bool(self.input(i))

    def dtype(self, i: int) -> int:
        """The element type of operand i."""
        return self.graph.tensor(self.input(i)).dtype

    def shape(self, i: int) -> Shape:
        """The shape of operand i."""
        return self.graph.tensor(self.input(i)).shape

    def get(self, name: str, default: _Value) -> _Value:
        """An attribute; the default where it is absent or of another kind than the default."""
        value: Any = None
        with suppress(ValueError):  # a damaged attribute
            if name in self.attributes:
                value = helper.get_attribute_value(self.attributes[name])
        value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        is_same_kind: bool = type(value) is type(default)
        return value if is_same_kind else default

    @property
    def label(self) -> str:
        """The name of the node, or its kind and first output."""
        return self.proto.name or f"{self.kind} of {self.output}"

    @property
    def op(self) -> str:
        """The scope and name of the IR operation, as irc writes them; "" for other exporters."""
        end, name = f"/{self.kind}.{self.output}", self.proto.name
        return name.removesuffix(end) if self.output and name.endswith(end) else ""


@dataclass
class Graph:
    """The main graph of a model, or one inside a node; local functions are inlined. `trouble` is
    why type inference failed, "" if it did not."""

    proto: GraphProto
    tensors: Mapping[str, Tensor]
    trouble: str = ""
    nodes: list[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = [Node(proto, self) for proto in self.proto.node]

    def all(self, types: Iterator[Mapping[str, Tensor]]) -> Iterator[Graph]:
        """This graph, and those inside its nodes, whose own `types` follow in the same order."""
        yield self
        for node in self.nodes:
            for proto in inner_graphs(node.proto):
                tensors = {**self.tensors, **next(types)}
                inner = replace(self, proto=proto, tensors=tensors)
                yield from inner.all(types)

    def of_kind(self, *kinds: str) -> Iterator[Node]:
        """The nodes whose op_type is one of `kinds`, in any domain."""
        return (node for node in self.nodes if node.kind in kinds)

    def tensor(self, name: str) -> Tensor:
        """The type of a value."""
        return self.tensors.get(name, _UNKNOWN)


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


# -- types

_SMALL = 4096  # bytes of an initializer whose numbers shapes may depend on
_INVENTED = "unk__"  # how inference names a size that it does not know
# Raised by the schema of DistCollective where attributes or types are missing or wrong.
_BY_DAMAGE = (ValueError, AttributeError, IndexError, ArithmeticError)
_LIKE_FIRST = ("TRT_Attention", "TRT_QuantizedAttention", "TRT_KVCacheUpdate")


def skeleton(whole: ModelProto) -> ModelProto:
    """The model without its weights, which become inputs, and with local functions inlined."""
    bare = ModelProto(ir_version=whole.ir_version)
    bare.opset_import.extend(whole.opset_import)
    bare.functions.extend(whole.functions)
    graph, source = bare.graph, whole.graph
    graph.name = source.name or "graph"
    graph.node.extend(source.node)
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    declared = {value.name for value in source.input}
    for weight in source.initializer:
        if weight.data_location != TensorProto.EXTERNAL and weight.ByteSize() <= _SMALL:
            graph.initializer.append(weight)
        elif weight.name not in declared:
            dims = list(weight.dims)
            graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, dims))
    if not bare.functions:
        return bare
    from onnx.inliner import inline_local_functions

    try:
        return inline_local_functions(bare)
    except (RuntimeError, ValueError) as error:
        raise Error(f"the functions of the model cannot be inlined: {error}") from None


def types_of(
    bare: ModelProto, initializers: Iterable[TensorProto]
) -> tuple[list[dict[str, Tensor]], str]:
    """The known types of a skeleton's values by name, and why inference failed, if it did.

    There is a dictionary for each graph, the main one first, in the order of `scopes`: the branches
    of an If may share names.
    """
    standard = ModelProto()
    standard.CopyFrom(bare)
    domains = {opset.domain for opset in standard.opset_import}
    for domain in sorted({node.domain for node in standard.graph.node} - domains):
        standard.opset_import.append(OperatorSetIdProto(domain=domain, version=1))
    register_schema()
    types: list[dict[str, Tensor]] = [{} for _ in scopes(bare.graph)]
    trouble = ""
    try:
        _replace(standard.graph)
        _collect(shape_inference.infer_shapes(standard, data_prop=True).graph, types)
    except (shape_inference.InferenceError, *_BY_DAMAGE) as error:  # not valid ONNX
        trouble = str(error)
    _collect(bare.graph, types)  # declared types take precedence
    types[0] |= _stored(initializers)
    return types, trouble


def _stored(initializers: Iterable[TensorProto]) -> dict[str, Tensor]:
    return {proto.name: Tensor(proto.data_type, tuple(proto.dims)) for proto in initializers}


def _collect(graph: GraphProto, types_of_scopes: list[dict[str, Tensor]]) -> None:
    for scope, types in zip(scopes(graph), types_of_scopes, strict=True):
        types |= _stored(scope.initializer)
        for value in (*scope.input, *scope.value_info, *scope.output):
            kind = value.type.tensor_type
            if value.type.HasField("tensor_type"):
                shape = types.get(value.name, _UNKNOWN).shape
                if kind.HasField("shape"):
                    shape = tuple(_size(dim) for dim in kind.shape.dim)
                types[value.name] = Tensor(kind.elem_type, shape)


def _size(dim: TensorShapeProto.Dimension) -> Size:
    if dim.HasField("dim_value"):
        return dim.dim_value
    named = dim.dim_param and not dim.dim_param.startswith(_INVENTED)
    return dim.dim_param if named else None


def _replace(graph: GraphProto) -> None:
    nodes = [standard for node in graph.node for standard in _stand_ins(node)]
    del graph.node[:]
    graph.node.extend(nodes)
    for node in graph.node:
        for inner in inner_graphs(node):
            _replace(inner)


def _stand_ins(proto: NodeProto) -> list[NodeProto]:
    """Nodes with schemas, whose outputs have the types of those of this one."""
    if proto.op_type in _LIKE_FIRST:
        return [helper.make_node("Identity", proto.input[:1], proto.output[:1])]
    if proto.op_type != COLLECTIVE_PLUGIN:
        return [proto]
    fields = {field.name: field.s.decode("utf-8", "replace") for field in proto.attribute}
    operation, ranks = fields.get("operation", ""), fields.get("group_size", "")
    if operation not in OPERATIONS:  # the fused one
        return [helper.make_node("Identity", proto.input[:1], [name]) for name in proto.output]
    attributes: dict[str, Any] = {"collective_operation": operation, "reduce_op": "none"}
    attributes["nb_rank"] = whole_number_in(ranks) or 1
    return [helper.make_node(COLLECTIVE, proto.input[:1], proto.output[:1], **attributes)]
