"""What lies in files: tensors, the manifest of an artifact, and the module that irc embedded.

Tensors are numbers where few are needed, else references to their bytes.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np

from irc.argument_checks import check_path
from irc.artifact.folder import ArtifactFolder
from irc.artifact.manifest import MANIFEST
from irc.errors import Error
from irc.files import open_file, stays_in
from irc.ir.core import Module, Weight
from irc.ir.dtypes import DTYPES as IR_DTYPES
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import numpy_dtype, unpacked
from irc.ir.mesh import Mesh
from irc.ir.verify import verify
from irc.ir.weight_parts import stored_part
from irc.json_files import read_object
from irc.onnx_format.files import leaves_folder
from irc.onnx_format.module_text import CHECKSUM, TEXT, checksum
from irc.ops.control import LARGEST_CONSTANT
from irc.text import parse_module
from irc.weights import BytesRef, Cast, FileRef, Ref, UnboundRef, UnpackedRef, ZerosRef
from irc.weights.safetensors import Tensor, read_header

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

Array: TypeAlias = np.ndarray[Any, Any]
# irc's names by the numbers of TensorProto.DataType.
DTYPES: dict[int, str] = {dtype.onnx: name for name, dtype in IR_DTYPES.items()}
_EXTERNAL = 1  # TensorProto.EXTERNAL
READ = 1 << 16  # the most elements that are read to find out what they mean
_LARGEST = 1 << 20  # bytes of a constant that irc writes into a model


@dataclass(frozen=True)
class Data:
    """A tensor of the file: its numbers, or the place of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    inline: Array | None = None
    path: str = ""
    offset: int = 0

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in its file."""
        return dtype_called(self.dtype).nbytes(self.count)

    def bytes(self) -> bytes:
        """The bytes in its file; empty for a tensor in no file."""
        if not self.path:
            return b""
        try:
            with open_file(self.path) as file:
                file.seek(self.offset)
                return file.read(self.nbytes)
        except OSError as error:
            raise Error(f"cannot read the weights in {self.path}: {error.strerror}") from None

    def read(self) -> Array | None:
        """The numbers, unless there are very many."""
        if self.inline is not None or self.count > READ:
            return self.inline
        data = self.bytes()
        if dtype_called(self.dtype).bits < 8:
            codes = unpacked(np.frombuffer(data, np.uint8), self.dtype)
            return codes[: self.count].reshape(self.shape)
        return np.frombuffer(data, numpy_dtype(self.dtype)).reshape(self.shape)


@dataclass
class Files:
    """The files that hold tensors, and the names that the module has for them.

    `path` is the model, `base` the folder that the locations of external data start from, `stated`
    the one that the manifest of an artifact names.
    """

    path: Path
    base: Path
    inside: bool = True  # whether external data must lie below the folder of the model
    stated: Path | None = None
    names: dict[str, str] = field(default_factory=dict[str, str])
    _headers: dict[str, dict[int, tuple[str, Tensor]]] = field(
        default_factory=dict[str, dict[int, tuple[str, Tensor]]]
    )

    def data(self, proto: TensorProto) -> Data:
        """What a tensor of the model is; an Error where its data is not what its shape says."""
        dtype = DTYPES.get(proto.data_type)
        data = Data(proto.name or "(a constant)", dtype or "", tuple(proto.dims))
        if dtype is None:
            raise self._error(data.name, "has a dtype that irc does not have")
        if proto.data_location == _EXTERNAL:
            return self._placed(proto, data)
        from onnx import numpy_helper

        try:
            return replace(data, inline=np.asarray(numpy_helper.to_array(proto)))
        except (ValueError, TypeError) as error:
            raise self._error(data.name, f"is damaged: {error}") from None

    def _error(self, name: str, fault: str) -> Error:
        return Error(f"the tensor {name!r} of {self.path} {fault}")

    def _placed(self, proto: TensorProto, data: Data) -> Data:
        place = {entry.key: entry.value for entry in proto.external_data}
        path = self._location(place.get("location"), data.name)
        size = self._size(path, data.name)
        try:
            offset = int(place.get("offset") or 0)
            length = int(place.get("length") or data.nbytes)
        except ValueError:
            raise self._error(data.name, "lies at no valid offset") from None
        if length != data.nbytes:
            type = f"{data.dtype}{list(data.shape)}"
            needs = f"is {type}, which takes {data.nbytes} bytes, found {length}"
            raise self._error(data.name, needs)
        if offset < 0 or offset + length > size:
            ends = f"ends at byte {offset + length} of {path}, which has {size}"
            raise self._error(data.name, f"{ends}: it is truncated, or another file")
        data = replace(data, path=path, offset=offset)
        inside = not place.get("location") and data.count <= LARGEST_CONSTANT
        return replace(data, inline=data.read()) if inside else data

    def _location(self, location: str | None, name: str) -> str:
        if location is None:
            raise self._error(name, "names no file for its data")
        if not location:
            return str(self.path)
        if "\0" in location:
            raise self._error(name, f"lies in {location!r}, which is not a path")
        if self.inside and leaves_folder(location):
            outside = "outside the model's folder, which ONNX forbids"
            raise self._error(name, f"lies in {location!r}, {outside}")
        beside = self.path.parent / location
        path = str(beside if beside.exists() else self.base / location)
        self.check_inside(path, name)
        return path

    def check_inside(self, path: str, name: str) -> None:
        """An Error where the data of a tensor lies outside the model's folder, links followed."""
        if self.inside and os.path.lexists(path) and not stays_in(path, self.path.parent):
            outside = f"outside the model's folder, which ONNX forbids{self._instead()}"
            raise self._error(name, f"lies in {path}, {outside}")

    def _instead(self) -> str:
        """What to do where only the manifest says where data is."""
        if self.stated is None:
            return ""
        return (
            f". The artifact says that its weights are below {self.stated}: compile the folder "
            f"{self.path.parent}, or give --trust if you trust who wrote it"
        )

    def _size(self, path: str, name: str) -> int:
        try:
            return os.stat(path).st_size
        except OSError as error:
            raise Error(
                f"the data of the tensor {name!r} of {self.path} should be in {path}: "
                f"{error.strerror}; put the file there{self._instead() if self.inside else ''}"
            ) from None

    def ref(self, data: Data) -> Ref:
        """The reference to a tensor whose bytes lie in a file, by its name in a checkpoint."""
        file = self.named(data.path)
        if data.path.endswith(".safetensors"):
            key, tensor = self._header(data.path).get(data.offset, ("", None))
            if tensor and (tensor.dtype, tensor.shape) == (data.dtype, data.shape):
                return FileRef(file, key)
        return BytesRef(file, data.offset, data.dtype, data.shape)

    def _header(self, path: str) -> dict[int, tuple[str, Tensor]]:
        """The tensors of a checkpoint by their offsets."""
        if path not in self._headers:
            header = read_header(path)
            self._headers[path] = {t.offset: (key, t) for key, t in header.items() if t.nbytes}
        return self._headers[path]

    def named(self, path: str) -> str:
        """The name that the module has for a file."""
        for name, file in self.names.items():
            if file == path:
                return name
        stem = re.sub(r"\W", "_", os.path.splitext(os.path.basename(path))[0]) or "file"
        name, n = stem, 1
        while name in self.names:
            name, n = f"{stem}_{n}", n + 1
        self.names[name] = path
        return name


class _Rank(TypedDict, total=False):
    model: str
    bindings: str | None


class _Program(TypedDict, total=False):
    """What is read here of the facts of the ONNX and TensorRT backends."""

    axes: list[tuple[str, int]]
    base: str | None
    ranks: list[_Rank]


@dataclass(frozen=True)
class Manifest:
    """Empty where a model is not part of an artifact.

    `rank` is the first that runs the model. `bound` are the inputs that are weights.
    """

    mesh: Mesh | None = None
    base: Path | None = None
    rank: int | None = None
    bound: dict[str, Data] = field(default_factory=dict[str, Data])


def manifest_of(path: Path) -> Manifest:
    """What the manifest beside the model `path` says."""
    folder = path.parent
    artifact = ArtifactFolder.find(folder)
    if artifact is None:
        return Manifest()
    program = artifact.facts(_Program)
    axes, written = tuple(program.get("axes", ())), program.get("base")
    mesh = Mesh(axes) if axes else None
    if written is not None:
        check_path(f"the base of the program in {folder / MANIFEST}", written)
    base = None if written is None else folder / written
    for rank, entry in enumerate(program.get("ranks", ())):
        if entry.get("model") == path.name:
            file = entry.get("bindings")
            bound = _bound(folder / file, base or folder) if file else {}
            return Manifest(mesh, base, rank, bound)
    return Manifest(mesh, base)


def _bound(path: Path, base: Path) -> dict[str, Data]:
    try:
        entries = read_object(path)
        bound = {name: _data(name, entry, path.parent, base) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Error(f"{path} does not say where the weights are ({error}); compile again") from None
    for name, data in bound.items():
        if data.offset < 0 or not Path(data.path).is_file():
            raise Error(f"the weight {name!r} should be in {data.path}, which does not exist")
    return bound


def _data(name: str, entry: Any, folder: Path, base: Path) -> Data:
    under = base if entry["under"] == "base" else folder
    kind, shape = dtype_called(str(entry["dtype"])).name, tuple(int(n) for n in entry["shape"])
    name = name.removesuffix(".rows")  # the second input of a weight that is also looked up in
    return Data(name, kind, shape, path=str(under / entry["file"]), offset=int(entry["offset"]))


def embedded_module(model: ModelProto, files: Files, bound: Mapping[str, Data]) -> Module | None:
    """The module whose text irc wrote into the metadata, its weights bound to the file's tensors.

    `bound` are the inputs of the graph that hold weights. None for a file without such text, and,
    with a warning, where the text does not fit.
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
        return _warn(files, "its graph was edited after irc wrote it")
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    try:
        module = parse_module(metadata[TEXT], f"the text in {files.path}")
    except Error as error:
        return _warn(files, f"this irc does not read the text in it ({error.message})")
    for weight in module.weights.values():
        stored = _stored(weight.ref)
        name = stored.key if isinstance(stored, UnboundRef) else ""
        if name not in tensors and name not in bound:
            return None  # its weights are inputs, and no manifest says where their bytes are
        _bind(weight, bound[name] if name in bound else files.data(tensors[name]), files)
        weight.type = stored_part(weight.ref, weight.type, module.mesh)
    module.files = dict(files.names)
    verify(module)
    return module


def _stored(ref: Ref) -> Ref:
    """The reference to a tensor of the file that another is computed from."""
    return ref.source if isinstance(ref, UnpackedRef) else ref


def _bind(weight: Weight, data: Data, files: Files) -> None:
    """Refer to the bytes of a weight, with a cast where they are stored in another dtype."""
    stored = _stored(weight.ref)
    padded = stored.shape if isinstance(stored, UnboundRef) else None
    kind = weight.type.dtype if stored is weight.ref else "i32"  # of the elements, or of words
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


def _warn(files: Files, reason: str) -> None:
    warnings.warn(
        f"{files.path} is read by its nodes, which say less than the module it was written from: "
        f"{reason}",
        stacklevel=2,
    )
