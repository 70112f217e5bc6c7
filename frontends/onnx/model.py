"""Reads an ONNX file: its structure in memory, its tensors left where they are.

Opsets older or newer than those that irc reads are converted by onnx.version_converter.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Set
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irc.errors import Error
from irc.files import open_file
from irc.frontends.onnx.tensors import DTYPES
from irc.frontends.onnx.wire import without_data
from irc.onnx_format.files import is_text, wiring

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

OLDEST, NEWEST = 13, 28  # opsets
_INT64 = 7  # TensorProto.INT64
STANDARD = ("", "ai.onnx")


def read_model(path: Path) -> ModelProto:
    """The model, of a known opset, functions inlined, nodes in an order in which they can run.

    Tensors of more than a few bytes are external data; the location "" is the file itself. An Error
    says what is wrong with a file that is no such model.
    """
    onnx = library()
    model = _parsed(path, _without_data(path), onnx)
    opset = opset_of(model, str(path))
    _scatter(model, path)
    if model.functions:
        model = _inlined(path, onnx.inliner.inline_local_functions, model)
    if not OLDEST <= opset <= NEWEST:
        model = _readable(model, opset, path)
    _sort(model, path)
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
        nodes += graph.node
        del graph.node[:]
        graph.node.extend(nodes)


def expanded(model: ModelProto, kinds: Set[str], path: Path) -> ModelProto | None:
    """The model without standard operators of some kinds, by ONNX's own functions for them.

    None where ONNX defines none of these by other operators, or cannot do it in this model.
    """
    opset = opset_of(model, str(path))
    found = {kind for kind in kinds if _is_function(kind, opset)}
    try:
        if not found:
            found = {kind for kind in kinds if _is_function(kind, NEWEST)}
            if not found or opset > NEWEST:
                return None
            opset, model = NEWEST, _converted(model, opset, NEWEST, path)
        for node in model.graph.node:
            if node.op_type in found and node.domain in STANDARD:
                _write_defaults(node, opset)
        ids = [("", kind) for kind in sorted(found)]
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


def schema_of(kind: str, opset: int) -> Any:
    """The standard operator of a kind in an opset, None where it has none."""
    from onnx import defs

    try:
        return defs.get_schema(kind, opset, "")
    except defs.SchemaError:
        return None


def _write_defaults(node: NodeProto, opset: int) -> None:
    """Give a node the attributes that it leaves to their defaults: functions refer to them."""
    present = [attribute.name for attribute in node.attribute]
    for name, attribute in schema_of(node.op_type, opset).attributes.items():
        if name not in present and attribute.default_value.type:
            node.attribute.add().CopyFrom(attribute.default_value)


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


def _converted(model: ModelProto, opset: int, target: int, path: Path) -> ModelProto:
    """The model in another opset; nodes keep their metadata."""
    onnx, converter = library(), import_module("onnx.version_converter")
    failures = RuntimeError, ValueError, converter.ConvertError, onnx.shape_inference.InferenceError
    kinds = {node.op_type for node in model.graph.node if node.domain in STANDARD}
    if opset < 13 and "Hardmax" in kinds:
        raise Error(
            f"{path}: Hardmax of opset {opset} is along several dimensions, and "
            "onnx.version_converter leaves it so; export the model again in opset 13"
        )
    if opset < 7:
        model = _aligned_at_the_end(model, path)
    try:
        found = converter.convert_version(model, target)
    except failures as error:
        reason = " ".join(str(error).split()).rpartition(" failed: ")[2]
        raise Error(
            f"{path} is of opset {opset}; irc reads {OLDEST} to {NEWEST}, and "
            f"onnx.version_converter cannot convert it to {target} ({reason}): export it again"
        ) from None
    if opset < 11:
        _state_places(found)
    metadata = {node.output[0]: node.metadata_props for node in model.graph.node if node.output}
    for node in found.graph.node:
        if node.output and node.output[0] in metadata:
            node.metadata_props.extend(metadata[node.output[0]])
    found.metadata_props.extend(model.metadata_props)
    return found


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


def _aligned_at_the_end(model: ModelProto, path: Path) -> ModelProto:
    """The model of opset 6 or older with second operands that broadcast as those of opset 7 do.

    `axis` says where the dimensions of the second operand are among those of the first, and the
    slope of PRelu is per channel. The converter ignores both.
    """
    onnx = library()
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except onnx.shape_inference.InferenceError:
        inferred = model
    graph = inferred.graph
    ndims = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    ndims |= {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        written = {attribute.name: attribute for attribute in node.attribute}
        axis = written.get("axis")
        is_along = "broadcast" in written and written["broadcast"].i and axis is not None
        if len(node.input) == 2 and (node.op_type == "PRelu" or is_along):
            first, second = (ndims.get(name) for name in node.input)
            if first is None or second is None:
                where = node.name or node.op_type
                raise Error(
                    f"{path}: {where} of opset 6 broadcasts along an axis, and the number of "
                    "dimensions of its operands is unknown; export the model again in opset 13"
                )
            at = 1 if axis is None else axis.i if axis.i >= 0 else first + axis.i
            if axis is not None:
                node.attribute.remove(axis)
            behind = range(second, first - at) if second else range(0)
            if behind:
                name = f"{node.input[1]}.of.{node.output[0]}"
                words: Any = {"axes": list(behind)}
                new = onnx.helper.make_node("Unsqueeze", [node.input[1]], [name], **words)
                model.graph.node.append(new)
                node.input[1] = name
        model.graph.node.append(node)
    return model


def _newer_kinds(model: ModelProto, opset: int) -> set[str]:
    """The standard operators whose version is newer than those that irc reads."""
    kinds = {node.op_type for node in model.graph.node if node.domain in STANDARD}
    found = {kind: schema_of(kind, opset) for kind in kinds}
    return {kind for kind, each in found.items() if each and each.since_version > NEWEST}


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
    found = [entry.version for entry in model.opset_import if entry.domain in STANDARD]
    if not found:
        raise Error(f"{name} is not an ONNX model: it names no version of the operators")
    return max(found)


def _without_data(path: Path) -> bytes:
    try:
        with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return without_data(data, str(path))
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise Error(f"{path} is not an ONNX model: it is empty") from None


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
        raise Error(f"{path} is damaged: a name in it is no text in UTF-8")
    return model


def _inlined(path: Path, inline: Callable[..., ModelProto], *arguments: Any) -> ModelProto:
    try:
        return inline(*arguments)
    except (RuntimeError, ValueError, library().shape_inference.InferenceError) as error:
        raise Error(f"{path}: its functions cannot be inlined: {error}") from None


def _sort(model: ModelProto, path: Path) -> None:
    """Reorder the nodes in place, if they need it; an Error where their names do not fit.

    A graph in order is left alone: collectives must run in the order that all ranks agree on.
    """
    graph = model.graph
    initial = [tensor.name for tensor in graph.initializer]
    constant = set(initial)  # which older files also have among the inputs
    inputs = [value.name for value in graph.input if value.name not in constant]
    found = wiring([*inputs, *initial], [(node.input, node.output) for node in graph.node])
    for _, name in found.duplicates:
        raise Error(f"{path}: two values of the graph are called {name!r}, which ONNX forbids")
    for _, name in found.missing:
        raise Error(f"{path}: nothing computes {name!r}, the operand of a node")
    if found.cycle:
        cycle = ", ".join(map(repr, found.cycle[:5]))
        raise Error(f"{path}: the values {cycle} depend on each other in a cycle")
    if found.unordered:
        makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
        needs = [[makers[name] for name in n.input if name in makers] for n in graph.node]
        ordered = type(graph)()
        ordered.node.extend(
            graph.node[i] for i in TopologicalSorter(dict(enumerate(needs))).static_order()
        )
        del graph.node[:]
        graph.node.extend(ordered.node)
