"""Types of all values of a model, through operators of TensorRT and IrcCollective too.

ONNX's own shape inference does the work, on a copy in which operators of TensorRT are replaced by
others of the same types, and weights by inputs, so that none of their bytes are copied. The types
of values behind users' plugins are unknown, unless the model declares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onnx import helper, shape_inference
from onnx.onnx_ml_pb2 import (
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
from irc.backends.tensorrt.lint.graph import Size, Tensor, inner_graphs, scopes
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.errors import Error
from irc.ops.collective_names import OPERATIONS

_SMALL = 4096  # bytes of an initializer whose numbers shapes may depend on
_INVENTED = "unk__"  # how inference names a size that it does not know
# Raised by the schema of DistCollective where attributes or types are missing or wrong.
_BY_DAMAGE = (ValueError, AttributeError, IndexError, ArithmeticError)
_LIKE_FIRST = ("TRT_Attention", "TRT_QuantizedAttention", "TRT_KVCacheUpdate")


def skeleton(model: ModelProto) -> ModelProto:
    """The model without its weights, which become inputs, and with local functions inlined."""
    bare = ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    graph, source = bare.graph, model.graph
    graph.name = source.name or "graph"
    graph.node.extend(source.node)
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    declared = {each.name for each in source.input}
    for each in source.initializer:
        if each.data_location != TensorProto.EXTERNAL and each.ByteSize() <= _SMALL:
            graph.initializer.append(each)
        elif each.name not in declared:
            dims = list(each.dims)
            graph.input.append(helper.make_tensor_value_info(each.name, each.data_type, dims))
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
    domains = {each.domain for each in standard.opset_import}
    for domain in sorted({node.domain for node in standard.graph.node} - domains):
        standard.opset_import.append(OperatorSetIdProto(domain=domain, version=1))
    register_schema()
    found: list[dict[str, Tensor]] = [{} for _ in scopes(bare.graph)]
    trouble = ""
    try:
        _replace(standard.graph)
        _collect(shape_inference.infer_shapes(standard, data_prop=True).graph, found)
    except (shape_inference.InferenceError, *_BY_DAMAGE) as error:  # not valid ONNX
        trouble = str(error)
    _collect(bare.graph, found)  # declared types take precedence
    found[0] |= _stored(initializers)
    return found, trouble


def _stored(initializers: Iterable[TensorProto]) -> dict[str, Tensor]:
    return {each.name: Tensor(each.data_type, tuple(each.dims)) for each in initializers}


def _collect(graph: GraphProto, all_found: list[dict[str, Tensor]]) -> None:
    for scope, found in zip(scopes(graph), all_found, strict=True):
        found |= _stored(scope.initializer)
        for value in (*scope.input, *scope.value_info, *scope.output):
            kind = value.type.tensor_type
            if value.type.HasField("tensor_type"):
                shape = tuple(_size(dim) for dim in kind.shape.dim)
                known = shape if kind.HasField("shape") else found.get(value.name, Tensor()).shape
                found[value.name] = Tensor(kind.elem_type, known)


def _size(dim: TensorShapeProto.Dimension) -> Size:
    if dim.HasField("dim_value"):
        return dim.dim_value
    named = dim.dim_param and not dim.dim_param.startswith(_INVENTED)
    return dim.dim_param if named else None


def _replace(graph: GraphProto) -> None:
    nodes = [each for node in graph.node for each in _stand_ins(node)]
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
    found = {each.name: each.s.decode("utf-8", "replace") for each in proto.attribute}
    operation, ranks = found.get("operation", ""), found.get("group_size", "")
    if operation not in OPERATIONS:  # the fused one
        return [helper.make_node("Identity", proto.input[:1], [name]) for name in proto.output]
    fields: dict[str, Any] = {"collective_operation": operation, "reduce_op": "none"}
    fields["nb_rank"] = whole_number_in(ranks) or 1
    return [helper.make_node(COLLECTIVE, proto.input[:1], proto.output[:1], **fields)]
