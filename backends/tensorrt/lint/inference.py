"""Types of all values of a model, operators of TensorRT included.

ONNX's own shape inference does the work. Operators it does not know are replaced, in a copy, by
standard ones of the same types; weights are replaced by inputs, so that no byte of them is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import helper, shape_inference
from onnx.onnx_ml_pb2 import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    TensorShapeProto,
    ValueInfoProto,
)

from irc.backends.tensorrt.lint.graph import Size, Tensor, inner_graphs
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.backends.tensorrt.plugins import register_schemas, users
from irc.errors import Error

SMALL = 4096  # bytes of an initializer whose value shapes may depend on
_WAYS_LIMIT = 1024  # ranks of a collective, for the stand-in of a gather
_INVENTED = "unk__"  # how inference calls a size that it cannot tell
_LIKE_FIRST = ("TRT_Attention", "TRT_QuantizedAttention", "TRT_KVCacheUpdate", "TRT_MoE")
_QUANTIZERS = {
    "TRT_FP8DequantizeLinear": "DequantizeLinear",
    "TRT_INT4DequantizeLinear": "DequantizeLinear",
    "TRT_FP8QuantizeLinear": "QuantizeLinear",
    "TRT_INT4QuantizeLinear": "QuantizeLinear",
}
_QUANTIZED = {
    "TRT_FP8QuantizeLinear": TensorProto.FLOAT8E4M3FN,
    "TRT_INT4QuantizeLinear": TensorProto.INT4,
}


def skeleton(model: ModelProto) -> ModelProto:
    """The model without its weights, which become inputs, and with local functions inlined."""
    bare = ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    graph, whole = bare.graph, model.graph
    graph.name = whole.name or "graph"
    graph.node.extend(whole.node)
    graph.input.extend(whole.input)
    graph.output.extend(whole.output)
    graph.value_info.extend(whole.value_info)
    graph.initializer.extend(each for each in whole.initializer if _is_small(each))
    declared = {each.name for each in whole.input}
    for each in whole.initializer:
        if not _is_small(each) and each.name not in declared:
            graph.input.append(_as_input(each))
    if not bare.functions:
        return bare
    from onnx.inliner import inline_local_functions

    try:
        return inline_local_functions(bare)
    except (RuntimeError, ValueError) as error:
        raise Error(f"the functions of the model cannot be put in place: {error}") from None


def _is_small(tensor: TensorProto) -> bool:
    return tensor.data_location != TensorProto.EXTERNAL and tensor.ByteSize() <= SMALL


def _as_input(tensor: TensorProto) -> ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))


def types_of(
    bare: ModelProto, initializers: Iterable[TensorProto]
) -> tuple[dict[str, Tensor], str]:
    """The type of every value of a skeleton that can be told, by name; why no more could be."""
    standard = ModelProto()
    standard.CopyFrom(bare)
    domains = {each.domain for each in standard.opset_import}
    for domain in sorted({node.domain for node in standard.graph.node} - domains):
        standard.opset_import.append(OperatorSetIdProto(domain=domain, version=1))
    _replace(standard.graph)
    if {spec.name for spec in users()} & {node.op_type for node in standard.graph.node}:
        register_schemas()
    found: dict[str, Tensor] = {}
    trouble = ""
    try:
        _collect(shape_inference.infer_shapes(standard, data_prop=True).graph, found)
    except (shape_inference.InferenceError, ValueError) as error:  # the model is no ONNX
        trouble = str(error)
    _collect(bare.graph, found)  # what is written counts
    for each in initializers:
        found[each.name] = Tensor(each.data_type, tuple(each.dims))
    return found, trouble


def _collect(graph: GraphProto, found: dict[str, Tensor]) -> None:
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if value.type.HasField("tensor_type"):
            shape = tuple(_size(dim) for dim in kind.shape.dim)
            known = shape if kind.HasField("shape") else found.get(value.name, Tensor()).shape
            found[value.name] = Tensor(kind.elem_type, known)
    for node in graph.node:
        for inner in inner_graphs(node):
            _collect(inner, found)


def _size(dim: TensorShapeProto.Dimension) -> Size:
    if dim.HasField("dim_value"):
        return dim.dim_value
    named = dim.dim_param and not dim.dim_param.startswith(_INVENTED)
    return dim.dim_param if named else None


def _replace(graph: GraphProto) -> None:
    nodes = [each for node in graph.node for each in stand_in(node)]
    del graph.node[:]
    graph.node.extend(nodes)
    for node in graph.node:
        for inner in inner_graphs(node):
            _replace(inner)


def stand_in(proto: NodeProto) -> Iterator[NodeProto]:
    """Standard nodes whose outputs have the types of this one's."""
    kind = proto.op_type
    if kind in ("DistCollective", COLLECTIVE_PLUGIN):
        yield from _of_collective(proto)
    elif kind in _LIKE_FIRST:
        yield helper.make_node("Identity", proto.input[:1], proto.output[:1])
    elif kind in _QUANTIZERS:
        new = NodeProto()
        new.CopyFrom(proto)
        new.op_type, new.domain = _QUANTIZERS[kind], ""
        if kind in _QUANTIZED:
            dtype = AttributeProto(name="output_dtype", type=AttributeProto.INT, i=_QUANTIZED[kind])
            new.attribute.append(dtype)
        yield new
    else:
        yield proto


def _of_collective(proto: NodeProto) -> Iterator[NodeProto]:
    operation, ways = collective(proto)
    first, outputs = proto.input[:1], list(proto.output)
    if operation in ("all_gather", "gather") and 1 < ways <= _WAYS_LIMIT:
        yield helper.make_node("Concat", [*first] * ways, outputs[:1], axis=0)
    elif operation in ("reduce_scatter", "scatter") and 1 < ways <= _WAYS_LIMIT:
        rest = [f"{outputs[0]}/part{i}" for i in range(1, ways)]
        yield helper.make_node("Split", first, [outputs[0], *rest], axis=0, num_outputs=ways)
    else:
        for name in outputs:
            yield helper.make_node("Identity", first, [name])


def collective(proto: NodeProto) -> tuple[str, int]:
    """The operation of a collective node, native or plugin, and how many ranks take part."""
    found = {each.name: each for each in proto.attribute}
    if proto.op_type == "DistCollective":
        ways = found.get("nb_rank")
        return _text(found.get("collective_operation")), int(ways.i) if ways else 1
    written = _text(found.get("ways"))
    return _text(found.get("operation")), int(written) if written.isdecimal() else 1


def _text(attribute: AttributeProto | None) -> str:
    return "" if attribute is None else attribute.s.decode("utf-8", "replace")
