"""An ONNX file as the builder reads it: nodes with their origins, weights in other files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from irc.artifact.manifest import Progress
from irc.errors import Error
from irc.source import Loc

if TYPE_CHECKING:
    from onnx.onnx_ml_pb2 import ModelProto, NodeProto, TensorProto

_CHUNK = 4 << 20
_ORIGIN = re.compile(r"(?P<file>.*):(?P<line>\d+)")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')  # in the stack traces that torch exports
_PLUGIN = ("plugin_version", "plugin_namespace")


class Node:
    """One ONNX node; an absent operand is called ""."""

    def __init__(self, proto: NodeProto) -> None:
        self.proto, self.kind = proto, proto.op_type
        self.inputs = list(proto.input)
        self.output = proto.output[0] if proto.output else ""  # "" of a damaged node
        # The parser calls a node without a name after its first output.
        self.name = proto.name or f"node_of_{self.output}"

    @property
    def source(self) -> str:
        """`file:line` of the model script, where the exporter recorded it, else ""."""
        metadata = {entry.key: entry.value for entry in self.proto.metadata_props}
        if "loc" in metadata:
            return metadata["loc"]
        lines = _LINE.findall(metadata.get("pkg.torch.onnx.stack_trace", ""))
        return ":".join(lines[-1]) if lines else ""

    @property
    def loc(self) -> Loc | None:
        """The line of the model script, with the scope of the operation."""
        origin = _ORIGIN.fullmatch(self.source)
        if origin is None:
            return None
        return Loc(origin["file"], int(origin["line"]), operation_of(self.name).rpartition("/")[0])

    def __str__(self) -> str:
        return f"{operation_of(self.name).rpartition('/')[2]} ({self.kind} {self.name})"


def operation_of(node: str) -> str:
    """`scope/opname` of a node called `scope/opname/Kind.output`."""
    first, *rest = node.split("/")
    if not rest:
        return node
    return first if "." in rest[0] or len(rest) == 1 else f"{first}/{rest[0]}"


@dataclass(frozen=True)
class External:
    """`size` bytes of a weight, from `offset` of a file that the model calls `location`."""

    location: str
    file: Path
    offset: int
    size: int


@dataclass(frozen=True)
class Model:
    """An ONNX file: the hash of its bytes, its nodes by name, its weights in other files."""

    path: Path
    digest: str
    nodes: Mapping[str, Node]
    external: tuple[External, ...]

    @property
    def has_plugins(self) -> bool:
        """Whether a node asks for a plugin."""
        protos = (node.proto for node in self.nodes.values())
        return any(field.name in _PLUGIN for proto in protos for field in proto.attribute)

    def mentioned(self, text: str) -> list[Node]:
        """The nodes whose names occur in a message, the longest names first."""
        nodes: list[Node] = []
        for name in sorted(filter(None, self.nodes), key=len, reverse=True):
            if name in text:
                nodes.append(self.nodes[name])
                text = text.replace(name, " ")
        return nodes


class Unreadable(Error):
    """The bytes of a file are not those of an ONNX model."""


def parse(path: Path) -> tuple[bytes, ModelProto]:
    """The bytes of an ONNX file, and the model without its external data."""
    from google.protobuf.message import DecodeError
    from onnx.onnx_ml_pb2 import ModelProto

    try:
        data = path.read_bytes()
        model = ModelProto.FromString(data)
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror}") from None
    except DecodeError:
        raise Unreadable(f"{path} is not an ONNX model, or is damaged; export it again") from None
    if not model.HasField("graph"):
        raise Error(f"{path} is not an ONNX model: it has no graph; export it again")
    return data, model


def read(path: Path, folders: Iterable[Path | None]) -> Model:
    """Parse an ONNX file; its external weights are located in the first folder that has them, and
    not read."""
    from onnx.onnx_ml_pb2 import TensorProto

    data, model = parse(path)
    present = [*filter(None, folders)]
    nodes = {node.name: node for node in map(Node, model.graph.node)}
    weights = (x for x in model.graph.initializer if x.data_location == TensorProto.EXTERNAL)
    external = dict.fromkeys(_located(proto, present) for proto in weights)
    return Model(path, hashlib.sha256(data).hexdigest(), nodes, tuple(external))


def _located(proto: TensorProto, folders: Iterable[Path]) -> External:
    entries = {entry.key: entry.value for entry in proto.external_data}
    candidates = [folder / entries["location"] for folder in folders]
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        places = " nor ".join(map(str, candidates))
        raise Error(f"the weight file {places} is missing; restore it, or compile again")
    offset = int(entries.get("offset", 0))
    size = int(entries.get("length", file.stat().st_size - offset))
    return External(entries["location"], file, offset, size)


def digest_of_weights(model: Model, progress: Progress) -> str:
    """A hash of the bytes of all external weights."""
    digest, done = hashlib.sha256(), 0
    total = sum(weight.size for weight in model.external)
    for weight in model.external:
        left = weight.size
        digest.update(left.to_bytes(8, "little"))
        with weight.file.open("rb") as file:
            file.seek(weight.offset)
            while chunk := file.read(min(_CHUNK, left)):
                digest.update(chunk)
                left, done = left - len(chunk), done + len(chunk)
                progress(f"reading the weights of {model.path.name}", done / total)
    return digest.hexdigest()
