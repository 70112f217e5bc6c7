"""Where the bytes of initializers lie: in the module's own files, or in one file of ours.

A tensor whose bytes lie in a file as they are needed is referred to in place. All others are
streamed into one file, a block at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from onnx.onnx_ml_pb2 import TensorProto

from irc.backends.onnx.graph import DTYPES, entries
from irc.checkpoint import Extent, Reader
from irc.core import Weight
from irc.dtypes import dtype
from irc.errors import Error
from irc.weights import Cast, Ref

ALIGNMENT = 4096  # a page, so that every tensor can be mapped


@dataclass
class _Placed:
    """One initializer and where its bytes come from."""

    proto: TensorProto
    ref: Weight | Ref
    nbytes: int
    extent: Extent | None  # in a file of the module, if its bytes are contiguous there
    offset: int = 0  # in our own file otherwise


@dataclass(frozen=True)
class Locations:
    """Where a model's weights are: `base` is the folder that checkpoint `files` are relative to;
    `inside` are files beside the model, ours and those of a bundle."""

    base: str | None
    files: list[str]
    inside: list[str]


class Storage:
    """Collects the initializers of one rank's model; `write` fixes where their bytes are."""

    def __init__(self, reader: Reader, rank: int, own: str) -> None:
        self.reader, self.rank, self.own = reader, rank, own
        self._placed: list[_Placed] = []
        self._end = 0

    def place(self, weight: Weight, name: str, compute: str) -> tuple[TensorProto, str]:
        """(an initializer for a weight, its stored dtype), for a graph that computes in `compute`.

        Where the weight is cast to `compute`, what the checkpoint holds is stored and cast there.
        """
        self.reader.check(weight)
        ref, stored = _as_stored(weight, self.reader, compute)
        if stored not in DTYPES:
            raise Error(f"weight @{weight.name} is {stored}, which onnx models cannot compute with")
        shape = self.reader.shape(ref)
        proto = TensorProto(name=name, data_type=DTYPES[stored])
        proto.dims.extend(shape)
        nbytes = prod(shape) * dtype(stored).bits // 8
        if not nbytes:
            proto.raw_data = b""
            return proto, stored
        extent = self.reader.extent(ref, self.rank)
        if extent is not None:
            real = replace(extent, path=os.path.realpath(extent.path))
            self._placed.append(_Placed(proto, ref, nbytes, real))
        else:
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            self._end = offset + nbytes
            self._placed.append(_Placed(proto, ref, nbytes, None, offset))
        return proto, stored

    def write(self, folder: Path, progress: Callable[[float], None] | None = None) -> Locations:
        """Write our own file into the model's folder if it is needed, and point at everything.

        `progress` is told the fraction that is written.
        """
        here = os.path.realpath(folder)
        paths = list(dict.fromkeys(p.extent.path for p in self._placed if p.extent is not None))
        outside = [path for path in paths if os.path.dirname(path) != here]
        base = os.path.commonpath([os.path.dirname(path) for path in outside]) if outside else None
        names = {path: os.path.relpath(path, base).replace(os.sep, "/") for path in outside}
        inside = {path: os.path.basename(path) for path in paths if path not in names}
        located = names | inside
        for placed in self._placed:
            if placed.extent is None:
                _point(placed.proto, self.own, placed.offset, placed.nbytes)
            else:
                extent = placed.extent
                name = located[extent.path]
                _point(placed.proto, name, extent.offset, extent.nbytes)
        converted = [placed for placed in self._placed if placed.extent is None]
        if converted:
            self._write_own(folder / self.own, converted, progress or (lambda done: None))
        own = [self.own] if converted else []
        return Locations(base, list(names.values()), [*inside.values(), *own])

    def _write_own(
        self, path: Path, converted: list[_Placed], progress: Callable[[float], None]
    ) -> None:
        try:
            with open(path, "wb") as out:
                for placed in converted:
                    out.seek(placed.offset)
                    for block in self.reader.stream(placed.ref, self.rank):
                        out.write(block.tobytes())
                    progress((placed.offset + placed.nbytes) / self._end)
        except OSError as error:
            raise Error(f"cannot write {path}: {error.strerror or error}") from error


def _as_stored(weight: Weight, reader: Reader, compute: str) -> tuple[Weight | Ref, str]:
    """The reference without the casts to `compute`, if its bytes are to be had in place then."""
    kind = weight.type.dtype
    steps = tuple(step for step in weight.ref.steps if step != Cast(compute))
    if kind != compute or len(steps) == len(weight.ref.steps):
        return weight, kind
    ref = replace(weight.ref, steps=steps)
    return (ref, reader.dtype(ref)) if reader.extent(ref) is not None else (weight, kind)


def _point(proto: TensorProto, location: str, offset: int, length: int) -> None:
    proto.data_location = TensorProto.EXTERNAL
    where = {"location": location, "offset": str(offset), "length": str(length)}
    proto.external_data.extend(entries(where))
