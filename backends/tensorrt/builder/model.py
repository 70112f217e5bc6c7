"""What the builder reads from an ONNX file: nodes with their origins, ports, external weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irc.artifact.manifest import Progress
from irc.errors import Error
from irc.source import Loc

if TYPE_CHECKING:
    from onnx.onnx_ml_pb2 import ModelProto

_CHUNK = 4 << 20
_ORIGIN = re.compile(r"(?P<file>.*):(?P<line>\d+)")
_PLUGIN = ("plugin_version", "plugin_namespace")


@dataclass(frozen=True)
class Node:
    """One ONNX node; `origin` is the user's `file:line`, or ""."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    origin: str

    @property
    def loc(self) -> Loc | None:
        """The user's line, with the scope of the operation."""
        found = _ORIGIN.fullmatch(self.origin)
        if found is None:
            return None
        return Loc(found["file"], int(found["line"]), operation_of(self.name).rpartition("/")[0])

    @property
    def label(self) -> str:
        """The node as text after its place, `model.py:12 in layers.0: `, if that is known."""
        return f"{self.loc.where()}: {self}" if self.loc is not None else str(self)

    def __str__(self) -> str:
        return f"{operation_of(self.name).rpartition('/')[2]} ({self.kind} {self.name})"


@dataclass(frozen=True)
class External:
    """The bytes of a weight in a file beside the model; `length` -1 means to the end."""

    location: str
    offset: int
    length: int


@dataclass(frozen=True)
class Model:
    """An ONNX file as the builder sees it."""

    path: Path
    digest: str
    nodes: Mapping[str, Node]
    external: tuple[External, ...]
    has_plugins: bool

    def mentioned(self, text: str) -> list[Node]:
        """The nodes whose names occur in a message, the longest names first."""
        found: list[Node] = []
        for name in sorted(filter(None, self.nodes), key=len, reverse=True):
            if name in text:
                found.append(self.nodes[name])
                text = text.replace(name, " ")
        return found


def operation_of(node: str) -> str:
    """`scope/opname` of a node called `scope/opname/Kind.output`."""
    first, *rest = node.split("/")
    if not rest:
        return node
    return first if "." in rest[0] or len(rest) == 1 else f"{first}/{rest[0]}"


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


def read(path: Path) -> Model:
    """Parse an ONNX file; its external weights are located, not read."""
    data, model = parse(path)
    graph: Any = model.graph
    nodes = [_node(node) for node in graph.node]
    return Model(
        path,
        hashlib.sha256(data).hexdigest(),
        {node.name: node for node in nodes},
        tuple(dict.fromkeys(_external(graph))),
        any(a.name in _PLUGIN for node in graph.node for a in node.attribute),
    )


def _node(node: Any) -> Node:
    # The parser calls a node without a name after its first output.
    name = node.name or f"node_of_{node.output[0]}"
    origin = next((each.value for each in node.metadata_props if each.key == "loc"), "")
    return Node(name, node.op_type, tuple(node.input), origin)


def _external(graph: Any) -> Iterator[External]:
    from onnx.onnx_ml_pb2 import TensorProto

    for initializer in graph.initializer:
        if initializer.data_location == TensorProto.EXTERNAL:
            entries = {each.key: each.value for each in initializer.external_data}
            offset, length = int(entries.get("offset", 0)), int(entries.get("length", -1))
            yield External(entries["location"], offset, length)


def locate(external: External, folders: Iterable[Path]) -> Path:
    """The file of an external weight in the first folder that has it."""
    tried = [folder / external.location for folder in folders]
    path = next((path for path in tried if path.is_file()), None)
    if path is None:
        places = " nor ".join(map(str, tried))
        raise Error(f"the weight file {places} is missing; restore it, or compile again")
    return path


def digest_of_weights(model: Model, folders: Iterable[Path], stage: str, progress: Progress) -> str:
    """A hash of the bytes of all external weights; "" if there are none."""
    if not model.external:
        return ""
    paths = [locate(each, tuple(folders)) for each in model.external]
    sizes = [
        each.length if each.length >= 0 else path.stat().st_size - each.offset
        for each, path in zip(model.external, paths, strict=True)
    ]
    digest, done = hashlib.sha256(), 0
    for external, path, size in zip(model.external, paths, sizes, strict=True):
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            file.seek(external.offset)
            while chunk := file.read(min(_CHUNK, size)):
                digest.update(chunk)
                size, done = size - len(chunk), done + len(chunk)
                progress(stage, done / sum(sizes))
    return digest.hexdigest()
