"""The tensors of a file: their numbers where few are needed, else references to their bytes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from irc.errors import Error
from irc.files import open_file, stays_in
from irc.ir.dtypes import DTYPES as IR_DTYPES
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import numpy_dtype, unpacked
from irc.onnx_format.files import leaves_folder
from irc.ops.control import LARGEST_CONSTANT
from irc.weights import BytesRef, FileRef, Ref
from irc.weights.safetensors import Tensor, read_header

if TYPE_CHECKING:
    from onnx import TensorProto

Array: TypeAlias = np.ndarray[Any, Any]
# irc's names by the numbers of TensorProto.DataType.
DTYPES: dict[int, str] = {each.onnx: name for name, each in IR_DTYPES.items()}
_EXTERNAL = 1  # TensorProto.EXTERNAL
READ = 1 << 16  # the most elements that are read to find out what they mean


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
            return unpacked(np.frombuffer(data, np.uint8), self.dtype)[: self.count].reshape(
                self.shape
            )
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
        name, shape = proto.name or "(a constant)", tuple(proto.dims)
        kind = DTYPES.get(proto.data_type)
        if kind is None:
            raise Error(f"the tensor {name!r} of {self.path} has a dtype that irc does not have")
        if proto.data_location != _EXTERNAL:
            from onnx import numpy_helper

            try:
                inline: Array = numpy_helper.to_array(proto)
            except (ValueError, TypeError) as error:
                raise Error(f"the tensor {name!r} of {self.path} is damaged: {error}") from None
            return Data(name, kind, shape, np.asarray(inline))
        return self._placed(proto, Data(name, kind, shape))

    def _placed(self, proto: TensorProto, data: Data) -> Data:
        where = {entry.key: entry.value for entry in proto.external_data}
        path = self._location(where.get("location"), data.name)
        size = self._size(path, data.name)
        try:
            offset = int(where.get("offset") or 0)
            length = int(where.get("length") or data.nbytes)
        except ValueError:
            raise Error(
                f"the tensor {data.name!r} of {self.path} lies at no valid offset"
            ) from None
        if length != data.nbytes:
            raise Error(
                f"the tensor {data.name!r} of {self.path} is {data.dtype}{list(data.shape)}, which "
                f"takes {data.nbytes} bytes, found {length}"
            )
        if offset < 0 or offset + length > size:
            raise Error(
                f"the tensor {data.name!r} of {self.path} ends at byte {offset + length} of "
                f"{path}, which has {size}: it is truncated, or another file"
            )
        data = replace(data, path=path, offset=offset)
        inside = not where.get("location") and data.count <= LARGEST_CONSTANT
        return replace(data, inline=data.read()) if inside else data

    def _location(self, location: str | None, name: str) -> str:
        if location is None:
            raise Error(f"the tensor {name!r} of {self.path} names no file for its data")
        if not location:
            return str(self.path)
        if "\0" in location:
            raise Error(
                f"the tensor {name!r} of {self.path} lies in {location!r}, which is no path"
            )
        if self.inside and leaves_folder(location):
            raise Error(
                f"the tensor {name!r} of {self.path} lies in {location!r}, outside the model's "
                "folder, which ONNX forbids"
            )
        beside = self.path.parent / location
        path = str(beside if beside.exists() else self.base / location)
        self.check_inside(path, name)
        return path

    def check_inside(self, path: str, name: str) -> None:
        """An Error where the data of a tensor lies outside the model's folder, links followed."""
        if not self.inside:
            return
        if os.path.lexists(path) and not stays_in(path, self.path.parent):
            raise Error(
                f"the tensor {name!r} of {self.path} lies in {path}, outside the model's folder, "
                f"which ONNX forbids{self._instead()}"
            )

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
        for name, known in self.names.items():
            if known == path:
                return name
        stem = re.sub(r"\W", "_", os.path.splitext(os.path.basename(path))[0]) or "file"
        name, n = stem, 1
        while name in self.names:
            name, n = f"{stem}_{n}", n + 1
        self.names[name] = path
        return name
