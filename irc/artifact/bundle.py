"""One safetensors file with every weight of a module, so that an artifact needs no checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..errors import Error
from ..ir.core import Module, Weight
from ..ir.dtypes import dtype
from ..ir.mesh import Mesh
from ..weights import Cast, FileRef, Ref, Shard, Step
from ..weights.checkpoint import Extent, Reader
from ..weights.safetensors import holds, lay_out

FILE = "weights"  # what the module calls the file
COPY = 1 << 20  # bytes in one block

Advance: TypeAlias = Callable[[float], None]  # gets the fraction that is written


@contextmanager
def bundled(module: Module, path: Path, advance: Advance = lambda done: None) -> Generator[str]:
    """Write every weight to `path`; in the block the module refers to that file, by its name alone.

    Yields the file's `sha256:...`, or "" for a module without weights, which gets no file.

    Keys are the names of the weights. What a cast widens is written in the narrow dtype of the
    checkpoint, and cast when it is read. The shards of the ranks are written one after the other,
    each in one piece.
    """
    if not module.weights:
        yield ""
        return
    files, refs = module.files, {weight: weight.ref for weight in module.weights.values()}
    reader = Reader(module)
    sources = {weight.name: _source(weight, module.mesh, reader) for weight in refs}
    hash = _write(path, reader, sources, advance)
    try:
        module.files = {FILE: path.name}
        for weight in refs:
            weight.ref = FileRef(FILE, weight.name, steps=sources[weight.name].steps)
        yield hash
    finally:
        module.files = files
        for weight, ref in refs.items():
            weight.ref = ref


@dataclass(frozen=True)
class _Source:
    """What is written of a weight: the shards of `ranks`, joined along the first dimension.

    Without ranks it is the same on all. `steps` recover every rank's weight from it.
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
    narrowed = reader.narrowed(weight)
    ref = narrowed if holds(reader.dtype(narrowed)) else reader.complete(weight)
    steps: list[Step] = [] if reader.dtype(ref) == kind.name else [Cast(kind.name)]
    shards = [step for step in ref.every_step() if isinstance(step, Shard)]
    axes = tuple(name for name in mesh.names if any(name in step.axes for step in shards))
    if mesh.group_size(axes) == 1:
        return _Source(ref, (), tuple(steps))
    return _Source(ref, tuple(mesh.groups(axes)[0]), (Shard(0, axes), *steps))


def _write(path: Path, reader: Reader, sources: Mapping[str, _Source], advance: Advance) -> str:
    """Write the file; its `sha256:...`, computed as the bytes are written."""
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key, source in sources.items():
        shape = reader.shape(source.ref)
        if source.ranks:
            shape = (shape[0] * len(source.ranks), *shape[1:])
        entries[key] = (reader.dtype(source.ref), shape)
    header, placed = lay_out(entries)
    size = sum((tensor.nbytes for tensor in placed.values()), len(header))
    digest = hashlib.sha256(header)
    with open(path, "wb") as out:
        out.write(header)
        for key, tensor in placed.items():
            for block in _blocks(reader, sources[key]):
                out.write(block)
                digest.update(block)
            advance((tensor.offset + tensor.nbytes) / size)
    return f"sha256:{digest.hexdigest()}"


def _blocks(reader: Reader, source: _Source) -> Iterator[bytes | memoryview]:
    """The bytes of a tensor in blocks: the shard of each rank after the other."""
    for rank in source.ranks or (0,):
        extent = reader.extent(source.ref, rank)
        if extent is not None:
            yield from _read(extent)
        else:
            yield from (block.tobytes() for (block,) in reader.stream_ranks(source.ref, [rank]))


def _read(extent: Extent) -> Iterator[memoryview]:
    """The bytes of an extent in blocks, each valid until the next one."""
    buffer = memoryview(bytearray(min(COPY, extent.nbytes)))  # new memory for each takes longer
    with open(extent.path, "rb", buffering=0) as file:
        file.seek(extent.offset)
        left = extent.nbytes
        while left:
            count = file.readinto(buffer[:left])
            if not count:
                raise Error(f"{extent.path} became shorter while it was read")
            left -= count
            yield buffer[:count]
