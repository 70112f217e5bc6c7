"""An ONNX file as protobuf: parsed without the bytes of its tensors, in an opset that irc reads.

Parsing a model of 2 GB copies all of it. Here the file is mapped, its wire format is walked, and
every tensor's data of more than a few bytes is replaced by its place, in the form that ONNX has for
external data: the location "" means the file itself. Opsets older or newer than those that irc
reads are converted by onnx.version_converter.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Set
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from irc.errors import Error
from irc.files import open_file
from irc.frontends.onnx.files import DTYPES
from irc.onnx_format.files import is_text, wiring

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

OLDEST, NEWEST = 13, 28  # opsets
KEPT = 16  # bytes of data that stay inside
STANDARD = ("", "ai.onnx")
_INT64 = 7  # TensorProto.INT64
_DATA = (9, 4, 10)  # raw data, floats and doubles; packed numbers lie as raw data does

Message: TypeAlias = str
# Message -> number of a field in onnx.proto -> the message in it, for all that lead to tensors.
_FIELDS: Mapping[Message, Mapping[int, Message]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}


def read_model(path: Path) -> ModelProto:
    """The model, of a known opset, functions inlined, nodes in an order in which they can run.

    Tensors of more than a few bytes are external data; the location "" is the file itself. An Error
    says what is wrong with a file that is no such model.
    """
    onnx = library()
    model = _parsed(path, _mapped(path), onnx)
    opset = opset_of(model, str(path))
    _scatter(model, path)
    if model.functions:
        model = _inlined(path, onnx.inliner.inline_local_functions, model)
    if not OLDEST <= opset <= NEWEST:
        model = _readable(model, opset, path)
    _sort(model, path)
    return model


def library() -> Any:
    """The package onnx; an Error where it is missing."""
    try:
        onnx = import_module("onnx")
        import_module("onnx.inliner")
        import_module("onnx.shape_inference")
    except ImportError as error:
        text = f"reading ONNX files needs the package onnx ({error}): pip install onnx"
        raise Error(text) from None
    return onnx


def opset_of(model: ModelProto, name: str) -> int:
    """The version of the standard operators."""
    versions = [entry.version for entry in model.opset_import if entry.domain in STANDARD]
    if not versions:
        raise Error(f"{name} is not an ONNX model: it names no version of the operators")
    return max(versions)


def schema_of(kind: str, opset: int) -> Any:
    """The standard operator of a kind in an opset, None where it has none."""
    from onnx import defs

    try:
        return defs.get_schema(kind, opset, "")
    except defs.SchemaError:
        return None


def _mapped(path: Path) -> bytes:
    try:
        with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return without_data(data, str(path))
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise Error(f"{path} is not an ONNX model: it is empty") from None


def without_data(data: mmap.mmap | bytes, name: str) -> bytes:
    """The model with the places of its data instead; an Error where it is no protobuf."""
    return b"".join(_Walk(data, name).message(0, len(data), "model"))


class _Walk:
    """The bytes of a file that may be damaged."""

    def __init__(self, data: mmap.mmap | bytes, name: str) -> None:
        self.data, self.name = data, name

    def message(self, at: int, end: int, kind: Message) -> list[bytes]:
        """A message between two bytes, in parts."""
        inner = _FIELDS.get(kind, {})
        parts: list[bytes] = []
        places: list[bytes] = []  # at the end, where they replace what the tensor says
        kept = at  # where unchanged bytes begin
        for start, number, begin, stop in self._fields(at, end):
            if stop - begin <= KEPT:
                continue
            if number in inner:
                nested = self.message(begin, stop, inner[number])
                size = _varint(sum(map(len, nested)))
                parts += [self.data[kept:start], _varint(number << 3 | 2), size, *nested]
            elif kind == "tensor" and number in _DATA:
                parts.append(self.data[kept:start])
                places.append(_place(begin, stop))
            else:
                continue
            kept = stop
        return [*parts, self.data[kept:end], *places]

    def _fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(where the field starts, its number, begin and end of its content)."""
        while at < end:
            start = at
            tag, at = self._varint(at, end)
            wire = tag & 7
            if wire == 0:
                begin, (_, at) = at, self._varint(at, end)
            elif wire in (1, 5):
                begin, at = at, at + (8 if wire == 1 else 4)
            elif wire == 2:
                size, begin = self._varint(at, end)
                at = begin + size
            else:
                raise Error(f"{self.name} is not an ONNX model")
            if at > end:
                raise Error(
                    f"{self.name} is not an ONNX model, or it is truncated: "
                    f"at byte {start} it announces {at - end} bytes more than there are"
                )
            yield start, tag >> 3, begin if wire == 2 else at, at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self.data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at
        raise Error(f"{self.name} is not an ONNX model, or it is truncated at byte {at}")


def _varint(value: int) -> bytes:
    """A number as protobuf writes it: 7 bits a byte, the lowest first."""
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _place(begin: int, stop: int) -> bytes:
    """The fields of a tensor that say at which bytes of the file itself its data is."""
    from onnx import TensorProto

    tensor = TensorProto(data_location=TensorProto.EXTERNAL)
    for key, value in (("location", ""), ("offset", begin), ("length", stop - begin)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor.SerializeToString()


def _parsed(path: Path, data: bytes, onnx: Any) -> ModelProto:
    from google.protobuf.message import DecodeError

    model: ModelProto = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise Error(f"{path} is not an ONNX model, or it is damaged") from None
    if not model.HasField("graph") or not model.ir_version:
        raise Error(f"{path} is not an ONNX model: it has no graph")
    if not is_text(model):
        raise Error(f"{path} is damaged: a name in it is not text in UTF-8")
    return model


def _scatter(model: ModelProto, path: Path) -> None:
    """Replace sparse initializers by nodes that put their values into zeros, in place."""
    helper, graph, nodes = library().helper, model.graph, list[Any]()
    for sparse in graph.sparse_initializer:
        name = sparse.values.name
        if sparse.values.data_type not in DTYPES:
            raise Error(f"{path}: the sparse tensor {name!r} has a dtype that irc does not have")
        parts = {part: f"{name}.{part}" for part in ("values", "indices", "shape", "flat")}
        linear = len(sparse.indices.dims) == 1
        dims = [math.prod(sparse.dims)] if linear else list(sparse.dims)
        for tensor, part in ((sparse.values, "values"), (sparse.indices, "indices")):
            tensor.name = parts[part]
            graph.initializer.append(tensor)
        for part, numbers in (("flat", dims), ("shape", list(sparse.dims))):
            tensor = helper.make_tensor(parts[part], _INT64, [len(numbers)], numbers)
            graph.initializer.append(tensor)
        zero = helper.make_tensor("", sparse.values.data_type, [1], [0])
        empty, filled = f"{name}.zeros", f"{name}.filled"
        kind = "ScatterElements" if linear else "ScatterND"
        operands = [empty, parts["indices"], parts["values"]]
        nodes += [
            helper.make_node("ConstantOfShape", [parts["flat"]], [empty], value=zero),
            helper.make_node(kind, operands, [filled]),
            helper.make_node("Reshape", [filled, parts["shape"]], [name]),
        ]
    if nodes:
        del graph.sparse_initializer[:]
        replace_nodes(model, [*nodes, *graph.node])


def replace_nodes(model: ModelProto, nodes: list[NodeProto]) -> None:
    """Give the graph of a model other nodes, in place; they may be some of its own."""
    copies = type(model.graph)(node=nodes)
    del model.graph.node[:]
    model.graph.node.extend(copies.node)


def expanded(model: ModelProto, kinds: Set[str], path: Path) -> ModelProto | None:
    """The model without standard operators of some kinds, by ONNX's own functions for them.

    None where ONNX defines none of these by other operators, or cannot do it in this model.
    """
    opset = opset_of(model, str(path))
    functions = {kind for kind in kinds if _is_function(kind, opset)}
    try:
        if not functions:
            functions = {kind for kind in kinds if _is_function(kind, NEWEST)}
            if not functions or opset > NEWEST:
                return None
            opset, model = NEWEST, _converted(model, opset, NEWEST, path)
        for node in model.graph.node:
            if node.op_type in functions and node.domain in STANDARD:
                _write_defaults(node, opset)
        ids = [("", kind) for kind in sorted(functions)]
        return _inlined(path, library().inliner.inline_selected_functions, model, ids, False, True)
    except Error:
        return None


def _is_function(kind: str, opset: int) -> bool:
    """Whether ONNX has a function for an operator that is valid in an opset."""
    schema = schema_of(kind, opset)
    if schema is None:
        return False
    versions = schema.function_opset_versions, schema.context_dependent_function_opset_versions
    return any(version <= opset for many in versions for version in many)


def _write_defaults(node: NodeProto, opset: int) -> None:
    """Give a node the attributes that it leaves to their defaults: functions refer to them."""
    present = [attribute.name for attribute in node.attribute]
    for name, attribute in schema_of(node.op_type, opset).attributes.items():
        if name not in present and attribute.default_value.type:
            node.attribute.add().CopyFrom(attribute.default_value)


def _inlined(path: Path, inline: Callable[..., ModelProto], *arguments: Any) -> ModelProto:
    try:
        return inline(*arguments)
    except (RuntimeError, ValueError, library().shape_inference.InferenceError) as error:
        raise Error(f"{path}: its functions cannot be inlined: {error}") from None


def _readable(model: ModelProto, opset: int, path: Path) -> ModelProto:
    """The model in the nearest opset that irc reads, where need be without newer operators."""
    target = OLDEST if opset < OLDEST else NEWEST
    tried: set[str] = set()
    while True:
        try:
            return _converted(model, opset, target, path)
        except Error:
            newer = _newer_kinds(model, opset) - tried if opset > NEWEST else set[str]()
            simpler = expanded(model, newer, path)
            if simpler is None:
                raise
            tried |= newer
            model = simpler


def _newer_kinds(model: ModelProto, opset: int) -> set[str]:
    """The standard operators whose version is newer than those that irc reads."""
    schemas = {kind: schema_of(kind, opset) for kind in _standard_kinds(model)}
    return {kind for kind, schema in schemas.items() if schema and schema.since_version > NEWEST}


def _standard_kinds(model: ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node if node.domain in STANDARD}


def _converted(model: ModelProto, opset: int, target: int, path: Path) -> ModelProto:
    """The model in another opset; nodes keep their metadata."""
    onnx, converter = library(), import_module("onnx.version_converter")
    failures = RuntimeError, ValueError, converter.ConvertError, onnx.shape_inference.InferenceError
    if opset < 13 and "Hardmax" in _standard_kinds(model):
        raise Error(
            f"{path}: Hardmax of opset {opset} is along several dimensions, and "
            "onnx.version_converter leaves it so; export the model again in opset 13"
        )
    if opset < 7:
        _align_at_the_end(model, path)
    try:
        converted = converter.convert_version(model, target)
    except failures as error:
        reason = " ".join(str(error).split()).rpartition(" failed: ")[2]
        raise Error(
            f"{path} is of opset {opset}; irc reads {OLDEST} to {NEWEST}, and "
            f"onnx.version_converter cannot convert it to {target} ({reason}): export it again"
        ) from None
    if opset < 11:
        _state_places(converted)
    metadata = {node.output[0]: node.metadata_props for node in model.graph.node if node.output}
    for node in converted.graph.node:
        if node.output and node.output[0] in metadata:
            node.metadata_props.extend(metadata[node.output[0]])
    converted.metadata_props.extend(model.metadata_props)
    return converted


def _state_places(model: ModelProto) -> None:
    """Let each Resize say, in place, what it means in opset 10, which the converter leaves out.

    That has no center of elements, and rounds down, but up where it shrinks, as ONNX Runtime does.
    """
    helper, graph = library().helper, model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    constants = (node for node in graph.node if node.op_type == "Constant" and node.attribute)
    tensors |= {node.output[0]: node.attribute[0].t for node in constants}
    for node in graph.node:
        if node.op_type == "Resize":
            scales = tensors.get(node.input[2])
            is_read = scales is not None and not scales.external_data
            shrinks = is_read and library().numpy_helper.to_array(scales).min(initial=1) < 1
            words = {"coordinate_transformation_mode": "asymmetric"}
            words["nearest_mode"] = "ceil" if shrinks else "floor"
            node.attribute.extend(helper.make_attribute(*word) for word in words.items())


def _align_at_the_end(model: ModelProto, path: Path) -> None:
    """Let second operands of opset 6 or older broadcast as those of opset 7 do, in place.

    `axis` says where the dimensions of the second operand are among those of the first, and the
    slope of PRelu is per channel. The converter ignores both.
    """
    onnx = library()
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except onnx.shape_inference.InferenceError:
        graph = model.graph
    ndims = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    ndims |= {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        written = {attribute.name: attribute for attribute in node.attribute}
        axis = written.get("axis")
        is_along = "broadcast" in written and written["broadcast"].i and axis is not None
        if len(node.input) == 2 and (node.op_type == "PRelu" or is_along):
            first, second = (ndims.get(name) for name in node.input)
            if first is None or second is None:
                raise Error(
                    f"{path}: {node.name or node.op_type} of opset 6 broadcasts along an axis, and "
                    "the number of dimensions of its operands is unknown; export the model again "
                    "in opset 13"
                )
            at = 1 if axis is None else axis.i if axis.i >= 0 else first + axis.i
            if axis is not None:
                node.attribute.remove(axis)
            if second and second < first - at:
                name, axes = f"{node.input[1]}.of.{node.output[0]}", list(range(second, first - at))
                nodes.append(onnx.helper.make_node("Unsqueeze", [node.input[1]], [name], axes=axes))
                node.input[1] = name
        nodes.append(node)
    replace_nodes(model, nodes)


def _sort(model: ModelProto, path: Path) -> None:
    """Reorder the nodes in place, if they need it; an Error where their names do not fit.

    A graph in order is left alone: collectives must run in the order that all ranks agree on.
    """
    graph = model.graph
    initial = [tensor.name for tensor in graph.initializer]
    constant = set(initial)  # which older files also have among the inputs
    inputs = [value.name for value in graph.input if value.name not in constant]
    faults = wiring([*inputs, *initial], [(node.input, node.output) for node in graph.node])
    for _, name in faults.duplicates:
        raise Error(f"{path}: two values of the graph are called {name!r}, which ONNX forbids")
    for _, name in faults.missing:
        raise Error(f"{path}: nothing computes {name!r}, the operand of a node")
    if faults.cycle:
        cycle = ", ".join(map(repr, faults.cycle[:5]))
        raise Error(f"{path}: the values {cycle} depend on each other in a cycle")
    if faults.unordered:
        producers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
        needs = [[producers[name] for name in n.input if name in producers] for n in graph.node]
        order = TopologicalSorter(dict(enumerate(needs))).static_order()
        replace_nodes(model, [graph.node[i] for i in order])
