"""What the builder has to know of an ONNX file: nodes and their origins, inputs, bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irc.artifact import Progress
from irc.errors import Error
from irc.source import Loc

_CHUNK = 4 << 20
_ORIGIN = re.compile(r"(?P<file>.*):(?P<line>\d+)")
_PLUGIN = ("plugin_version", "plugin_namespace")
# ONNX's element types under the names of TensorRT's DataType.
_DATA_TYPES = {
    "FLOAT": "FLOAT",
    "FLOAT16": "HALF",
    "BFLOAT16": "BF16",
    "INT8": "INT8",
    "UINT8": "UINT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "INT4": "INT4",
    "BOOL": "BOOL",
    "FLOAT8E4M3FN": "FP8",
    "FLOAT4E2M1": "FP4",
}


@dataclass(frozen=True)
class Node:
    """One ONNX node; `origin` is the user's `file:line`, or nothing."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    origin: str

    @property
    def loc(self) -> Loc | None:
        """The user's line, with the scope that stands in the name."""
        found = _ORIGIN.fullmatch(self.origin)
        if found is None:
            return None
        return Loc(found["file"], int(found["line"]), self.operation.rpartition("/")[0])

    @property
    def operation(self) -> str:
        """The IR operation it was made for, `scope/opname`."""
        return operation_of(self.name)

    def __str__(self) -> str:
        return f"{self.operation.rpartition('/')[2]} ({self.kind} {self.name})"


@dataclass(frozen=True)
class External:
    """Bytes of a weight in a file beside the model; `length` -1 means to the end."""

    location: str
    offset: int
    length: int


@dataclass(frozen=True)
class Model:
    """An ONNX file as the builder sees it. Data types are those of TensorRT, `HALF`."""

    path: Path
    digest: str
    nodes: Mapping[str, Node]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    external: tuple[External, ...]
    has_plugins: bool

    def find(self, name: str) -> Node | None:
        """The node of a name that the library uses, where it is one of the file's."""
        return self.nodes.get(name)

    def mentioned(self, text: str) -> list[Node]:
        """The nodes whose names occur in a message, the longest names first."""
        named = [node for name, node in self.nodes.items() if name and name in text]
        found: list[Node] = []
        for node in sorted(named, key=lambda each: -len(each.name)):
            if node.name in text:
                found.append(node)
                text = text.replace(node.name, " ")
        return found

    def readers(self, value: str) -> list[tuple[Node, int]]:
        """The nodes that read a value, and as which of their inputs."""
        return [
            (node, i)
            for node in self.nodes.values()
            for i, name in enumerate(node.inputs)
            if name == value
        ]


def operation_of(node: str) -> str:
    """`scope/opname` of a node called `scope/opname/Kind.output`."""
    first, *rest = node.split("/")
    if not rest:
        return node
    return first if "." in rest[0] or len(rest) == 1 else f"{first}/{rest[0]}"


def read(path: Path) -> Model:
    """An ONNX file; its external weights are only looked up, not read."""
    from google.protobuf.message import DecodeError
    from onnx.onnx_ml_pb2 import ModelProto

    proto = ModelProto()
    try:
        data = path.read_bytes()
        proto.ParseFromString(data)
    except OSError as error:
        raise Error(f"cannot read the model {path}: {error.strerror}") from None
    except DecodeError:
        raise Error(f"{path} is no ONNX file, or a damaged one") from None
    graph: Any = proto.graph
    if not graph.node and not graph.output:
        raise Error(f"{path} is no ONNX file: it has no nodes and no outputs")
    constants = {initializer.name for initializer in graph.initializer}
    nodes = [_node(node) for node in graph.node]
    return Model(
        path,
        hashlib.sha256(data).hexdigest(),
        {node.name: node for node in nodes},
        _ports(value for value in graph.input if value.name not in constants),
        _ports(graph.output),
        tuple(_external(graph)),
        any(a.name in _PLUGIN for node in graph.node for a in node.attribute),
    )


def _node(node: Any) -> Node:
    # The parser calls a node without a name after its first output.
    name = node.name or f"node_of_{node.output[0]}"
    origin = next((each.value for each in node.metadata_props if each.key == "loc"), "")
    return Node(name, node.op_type, tuple(node.input), origin)


def _ports(values: Iterable[Any]) -> dict[str, str]:
    from onnx.onnx_ml_pb2 import TensorProto

    names: Any = TensorProto.DataType
    kinds = {value.name: str(names.Name(value.type.tensor_type.elem_type)) for value in values}
    return {name: _DATA_TYPES.get(kind, kind) for name, kind in kinds.items()}


def _external(graph: Any) -> Iterator[External]:
    from onnx.onnx_ml_pb2 import TensorProto

    found: dict[External, None] = {}
    for initializer in graph.initializer:
        if initializer.data_location != TensorProto.EXTERNAL:
            continue
        entries = {each.key: each.value for each in initializer.external_data}
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", -1))
        found.setdefault(External(entries["location"], offset, length))
    yield from found


def locate(external: External, folders: Iterable[Path]) -> Path:
    """The file of an external weight, in the first folder that has it; all its bytes are there."""
    tried = [folder / external.location for folder in folders]
    path = next((path for path in tried if path.is_file()), None)
    if path is None:
        places = " nor ".join(map(str, tried))
        raise Error(f"the weight file {places} is gone; put it back, or compile again")
    if external.offset + max(0, external.length) > path.stat().st_size:
        raise Error(
            f"{path} ends before the weight at byte {external.offset} does: "
            "the file was cut short; put it back, or compile again"
        )
    return path


def digest_of_weights(model: Model, folders: Iterable[Path], stage: str, progress: Progress) -> str:
    """A hash of all bytes that the model's weights have in other files; nothing where none."""
    if not model.external:
        return ""
    folders = tuple(folders)
    digest, done = hashlib.sha256(), 0
    sizes = [_size(each, locate(each, folders)) for each in model.external]
    total = max(1, sum(sizes))
    for external, size in zip(model.external, sizes, strict=True):
        digest.update(size.to_bytes(8, "little"))
        with locate(external, folders).open("rb") as file:
            file.seek(external.offset)
            while size > 0:
                chunk = file.read(min(_CHUNK, size))
                digest.update(chunk)
                size, done = size - len(chunk), done + len(chunk)
                progress(stage, done / total)
    return digest.hexdigest()


def _size(external: External, path: Path) -> int:
    if external.length >= 0:
        return external.length
    return path.stat().st_size - external.offset
