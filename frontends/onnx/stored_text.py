"""The module whose text irc wrote into an ONNX file, its weights bound to the file's tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from irc.errors import Error
from irc.frontends.onnx.tensors import Data, Files
from irc.ir.core import Module, Weight
from irc.ir.verify import verify
from irc.onnx_format.module_text import CHECKSUM, TEXT, checksum
from irc.text import parse_module
from irc.weights import Cast, Ref, UnboundRef, UnpackedRef, ZerosRef

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

_LARGEST = 1 << 20  # bytes of a constant that irc writes into a model


def stored_module(model: ModelProto, files: Files, bound: Mapping[str, Data]) -> Module | None:
    """The module of the text in the metadata; None, with a warning, where it does not fit.

    `bound` are the inputs of the graph that hold weights. A file without such text gives None.
    """
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if TEXT not in metadata:
        return None

    def constant(tensor: TensorProto) -> bytes:
        if tensor.raw_data:
            return tensor.raw_data
        data = files.data(tensor)
        return data.bytes() if data.nbytes <= _LARGEST else b""

    if metadata.get(CHECKSUM) != checksum(model.graph, constant):
        return _without(files, "its graph was edited after irc wrote it")
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    try:
        module = parse_module(metadata[TEXT], f"the text in {files.path}")
    except Error as error:
        return _without(files, f"this irc does not read the text in it ({error.message})")
    for weight in module.weights.values():
        held = _held(weight.ref)
        name = held.key if isinstance(held, UnboundRef) else ""
        if name not in tensors and name not in bound:
            return None  # its weights are inputs, and no manifest says where their bytes are
        _bind(weight, bound[name] if name in bound else files.data(tensors[name]), files)
    module.files = dict(files.names)
    verify(module)
    return module


def _held(ref: Ref) -> Ref:
    """The reference to a tensor of the file that another is computed from."""
    return ref.source if isinstance(ref, UnpackedRef) else ref


def _bind(weight: Weight, data: Data, files: Files) -> None:
    """Refer to the bytes of a weight, with a cast where they are stored in another dtype."""
    held = _held(weight.ref)
    padded = held.shape if isinstance(held, UnboundRef) else None
    kind = weight.type.dtype if held is weight.ref else "i32"  # of the elements, or of words
    if data.dtype == "u8" != kind:  # codes that a node reads as bytes
        sizes = tuple(int(str(size)) for size in padded or weight.type.shape)
        viewed = replace(data, dtype=kind, shape=sizes)
        data = viewed if viewed.nbytes == data.nbytes else data
    if data.shape != (padded or weight.type.shape):
        raise Error(f"the weight {weight.name} is {weight.type} and its tensor {list(data.shape)}")
    ref = files.ref(data) if data.count else ZerosRef(data.shape, data.dtype)
    ref = ref if kind == data.dtype else ref.then(Cast(kind))
    if isinstance(weight.ref, UnpackedRef):
        weight.ref = replace(weight.ref, source=ref)
        return
    for step in weight.ref.steps:
        ref = ref.then(step)
    weight.ref = ref


def _without(files: Files, reason: str) -> None:
    warnings.warn(
        f"{files.path} is read by its nodes, which say less than the module it was written from: "
        f"{reason}",
        stacklevel=2,
    )
