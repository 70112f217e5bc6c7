"""Reads an ONNX file: its structure in memory, its tensors left where they are."""

from __future__ import annotations

import mmap
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irc.errors import Error
from irc.frontends.onnx.order import in_order
from irc.frontends.onnx.wire import without_data
from irc.interchange import is_text

if TYPE_CHECKING:
    from onnx import ModelProto

OLDEST, NEWEST = 13, 24  # opsets
STANDARD = ("", "ai.onnx")


def read_model(path: Path) -> ModelProto:
    """The model, functions inlined, nodes in an order in which they can run.

    Tensors of more than a few bytes are external data; the location "" is the file itself. An Error
    says what is wrong with a file that is no such model.
    """
    onnx = library()
    model = _parsed(path, _without_data(path), onnx)
    opset = opset_of(model, str(path))
    if not OLDEST <= opset <= NEWEST:
        raise Error(
            f"{path} is of opset {opset}; irc reads {OLDEST} to {NEWEST}: export it again, or "
            "convert it with onnx.version_converter"
        )
    if model.functions:
        model = _inlined(model, onnx, path)
    in_order(model, path)
    return model


def library() -> Any:
    """The package onnx; an Error where it is missing."""
    try:
        onnx = import_module("onnx")
        import_module("onnx.inliner")
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
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
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


def _inlined(model: ModelProto, onnx: Any, path: Path) -> ModelProto:
    try:
        return onnx.inliner.inline_local_functions(model)
    except (RuntimeError, ValueError) as error:
        raise Error(f"{path}: its functions cannot be put in place: {error}") from None
