"""One safetensors file with every weight of a module, so that an artifact stands alone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from .checkpoint import Extent, Reader
from .core import Module, Weight
from .dtypes import dtype
from .errors import Error
from .mesh import Mesh
from .safetensors import Tensor, holds, lay_out
from .weights import Cast, FileRef, Ref, Shard, Step

FILE = "weights"  # what the module calls the file
COPY = 8 << 20  # bytes in one call of the system
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)

Advance: TypeAlias = Callable[[float], None]  # told the fraction that is written


@contextmanager
def bundled(module: Module, path: Path, advance: Advance = lambda done: None) -> Generator[None]:
    """Write every weight to `path`; inside, the module refers to that file, by its name alone.

    Keys are the names of the weights. What a cast widens is written narrow, as the checkpoint has
    it, and cast when it is read. The parts that ranks cut out lie one after the other, so that
    each is in one piece. A module without weights gets no file.
    """
    if not module.weights:
        yield
        return
    files, refs = module.files, {weight: weight.ref for weight in module.weights.values()}
    reader = Reader(module)
    sources = {weight.name: _source(weight, module.mesh, reader) for weight in refs}
    _write(path, reader, sources, advance)
    try:
        module.files = {FILE: path.name}
        for weight in refs:
            weight.ref = FileRef(FILE, weight.name, steps=sources[weight.name].steps)
        yield
    finally:
        module.files = files
        for weight, ref in refs.items():
            weight.ref = ref


@dataclass(frozen=True)
class _Source:
    """What is written of a weight: the parts of `ranks`, joined along the first dimension.

    Without ranks it is the same on all. `steps` make every rank's weight of it again.
    """

    ref: Ref
    ranks: tuple[int, ...]
    steps: tuple[Step, ...]


def _source(weight: Weight, mesh: Mesh, reader: Reader) -> _Source:
    reader.check(weight)
    kind = dtype(weight.type.dtype)
    if not holds(kind.name):
        raise Error(
            f"weight @{weight.name} is {kind.name}, which a safetensors file cannot hold; "
            "leave out --bundle"
        )
    ref = reader.narrowed(weight)
    if not holds(reader.dtype(ref)):
        ref = reader.settled(weight)
    steps: list[Step] = [] if reader.dtype(ref) == kind.name else [Cast(kind.name)]
    shards = [step for step in ref.every_step() if isinstance(step, Shard)]
    axes = tuple(name for name in mesh.names if any(name in step.axes for step in shards))
    if mesh.ways(axes) == 1:
        return _Source(ref, (), tuple(steps))
    return _Source(ref, tuple(mesh.groups(axes)[0]), (Shard(0, axes), *steps))


def _entry(reader: Reader, source: _Source) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of the tensor in the file."""
    shape = reader.shape(source.ref)
    if source.ranks:
        shape = (shape[0] * len(source.ranks), *shape[1:])
    return reader.dtype(source.ref), shape


def _write(path: Path, reader: Reader, sources: Mapping[str, _Source], advance: Advance) -> None:
    header, placed = lay_out({key: _entry(reader, source) for key, source in sources.items()})
    size = sum((tensor.nbytes for tensor in placed.values()), len(header))
    with open(path, "wb") as out:
        out.write(header)
        for key, tensor in placed.items():
            _write_tensor(out, reader, sources[key], tensor)
            out.seek(tensor.offset + tensor.nbytes)
            advance((tensor.offset + tensor.nbytes) / size)


def _write_tensor(out: BinaryIO, reader: Reader, source: _Source, tensor: Tensor) -> None:
    """Copy what lies in one piece; what is left of several ranks is converted in lockstep."""
    ranks = source.ranks or (0,)
    part = tensor.nbytes // len(ranks)
    left: dict[int, int] = {}  # where the next block of a rank goes
    out.flush()
    for i, rank in enumerate(ranks):
        extent = reader.extent(source.ref, rank)
        if extent is None:
            left[rank] = tensor.offset + i * part
        else:
            _copy(extent, out.fileno(), tensor.offset + i * part)
    for blocks in reader.stream_ranks(source.ref, list(left)) if left else ():
        for rank, block in zip(left, blocks, strict=True):
            out.seek(left[rank])
            left[rank] += out.write(block.tobytes())


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
