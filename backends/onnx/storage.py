"""Where the bytes of initializers lie: in the checkpoint's own files, or in one file of ours.

A tensor whose bytes lie in a checkpoint as they are needed is referred to in place. All others,
and with `bundle` every one, are streamed into one file, a block at a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
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
COPY = 8 << 20  # bytes in one call of the system
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


@dataclass
class _Placed:
    """One initializer and where its bytes come from."""

    proto: TensorProto
    ref: Weight | Ref
    extent: Extent | None  # in a checkpoint file, if its bytes are contiguous there
    offset: int = -1  # in our own file, if it goes there
    nbytes: int = 0


class Storage:
    """Collects the initializers of one rank's model; `write` fixes where their bytes are."""

    def __init__(self, reader: Reader, rank: int, own: str, bundle: bool) -> None:
        self.reader, self.rank, self.own, self.bundle = reader, rank, own, bundle
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
        placed = _Placed(proto, ref, extent, nbytes=nbytes)
        if extent is None or self.bundle:
            placed.offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            self._end = placed.offset + nbytes
        else:
            placed.extent = replace(extent, path=os.path.realpath(extent.path))
        self._placed.append(placed)
        return proto, stored

    def write(
        self, folder: Path, progress: Callable[[float], None] | None = None
    ) -> tuple[str | None, list[str], bool]:
        """(the folder that checkpoint files are relative to, those files, whether ours exists).

        `progress` is told the fraction that is written.
        """
        outside = [p.extent.path for p in self._placed if p.offset < 0 and p.extent is not None]
        files = list(dict.fromkeys(outside))
        base = _common_folder(files)
        relative = {path: os.path.relpath(path, base).replace(os.sep, "/") for path in files}
        for placed in self._placed:
            if placed.offset >= 0:
                _point(placed.proto, self.own, placed.offset, placed.nbytes)
            elif placed.extent is not None:
                extent = placed.extent
                _point(placed.proto, relative[extent.path], extent.offset, extent.nbytes)
        inside = [p for p in self._placed if p.offset >= 0]
        if inside:
            self._write_own(folder / self.own, inside, progress or (lambda done: None))
        return base, list(relative.values()), bool(inside)

    def _write_own(
        self, path: Path, inside: list[_Placed], progress: Callable[[float], None]
    ) -> None:
        try:
            with open(path, "wb") as out:
                for placed in inside:
                    out.seek(placed.offset)
                    if placed.extent is not None:
                        _copy(placed.extent, out.fileno(), placed.offset)
                    else:
                        for block in self.reader.stream(placed.ref, self.rank):
                            out.write(block.tobytes())
                        out.flush()
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


def _common_folder(files: Sequence[str]) -> str | None:
    return os.path.commonpath([os.path.dirname(path) for path in files]) if files else None


def _point(proto: TensorProto, location: str, offset: int, length: int) -> None:
    proto.data_location = TensorProto.EXTERNAL
    where = {"location": location, "offset": str(offset), "length": str(length)}
    proto.external_data.extend(entries(where))


def _copy(extent: Extent, target: int, offset: int) -> None:
    """Copy bytes between files inside the system where it can, else through a small buffer."""
    with open(extent.path, "rb") as source:
        done = _copy_inside(source.fileno(), target, extent, offset)
        while done < extent.nbytes:
            block = os.pread(source.fileno(), min(COPY, extent.nbytes - done), extent.offset + done)
            if not block:
                raise Error(f"{extent.path} became shorter while it was read")
            done += os.pwrite(target, block, offset + done)


def _copy_inside(source: int, target: int, extent: Extent, offset: int) -> int:
    """How many bytes the system copied by itself; fewer than all where it cannot."""
    done = 0
    if not hasattr(os, "copy_file_range"):
        return done
    while done < extent.nbytes:
        count = min(COPY, extent.nbytes - done)
        try:
            moved = os.copy_file_range(source, target, count, extent.offset + done, offset + done)
        except OSError as error:
            if error.errno in _CANNOT:
                return done
            raise
        if not moved:
            return done
        done += moved
    return done
