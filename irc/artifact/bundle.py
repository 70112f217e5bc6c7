"""One safetensors file with every weight of a module, so that an artifact needs no checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from ..errors import Error
from ..ir.core import Module, Weight
from ..ir.dtypes import dtype
from ..ir.mesh import Mesh
from ..ir.weight_parts import stored_part
from ..weights import BytesRef, Cast, FileRef, Ref, Shard, Step
from ..weights.checkpoint import Extent, Reader
from ..weights.safetensors import Tensor, holds, lay_out
from .atomic import check_space

FILE = "weights"  # what the module calls the file
COPY = 1 << 20  # bytes in one block

Advance: TypeAlias = Callable[[float], None]  # gets the fraction that is written


@contextmanager
def bundled(module: Module, path: Path, advance: Advance = lambda done: None) -> Generator[str]:
    """Write every weight to `path`; in the block the module refers to that file, by its name alone.

    Yields the file's `sha256:...`, or "" for a module without weights, which gets no file.

    Keys are the names of the weights. The format lacks integers of four bits: they are bytes there,
    to which the module refers by their offset. What a cast widens is written in the narrow dtype of
    the checkpoint, and cast when it is read. The shards of the ranks are written one after the
    other, each in one piece.
    """
    if not module.weights:
        yield ""
        return
    files = module.files
    refs = {weight: (weight.ref, weight.type) for weight in module.weights.values()}
    reader = Reader(module)
    reader.check_copied(refs)
    sources = {weight.name: _source(weight, module.mesh, reader) for weight in refs}
    header, placed = lay_out({name: source.stored for name, source in sources.items()})
    hash = _write(
        path, header, placed, _blocks(reader, {key: sources[key] for key in placed}), advance
    )
    try:
        module.files = {FILE: path.name}
        for weight in refs:
            ref = sources[weight.name].written(weight.name, placed[weight.name].offset)
            weight.ref, weight.type = ref, stored_part(ref, weight.type, module.mesh)
        yield hash
    finally:
        module.files = files
        for weight, (ref, type) in refs.items():
            weight.ref, weight.type = ref, type


@dataclass(frozen=True)
class _Source:
    """What is written of a weight: the shards of `ranks`, joined along the first dimension.

    Without ranks it is the same on all. `dtype` and `shape` are those of what is written, `steps`
    recover every rank's weight from it.
    """

    ref: Ref
    ranks: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) in the file."""
        if holds(self.dtype):
            return self.dtype, self.shape
        return "u8", (dtype(self.dtype).nbytes(prod(self.shape)),)

    def written(self, key: str, offset: int) -> Ref:
        """The reference to it in the file."""
        if holds(self.dtype):
            return FileRef(FILE, key, steps=self.steps)
        return BytesRef(FILE, offset, self.dtype, self.shape, steps=self.steps)


def _source(weight: Weight, mesh: Mesh, reader: Reader) -> _Source:
    reader.check(weight)
    kind = dtype(weight.type.dtype)
    narrowed = reader.narrowed(weight)
    ref = narrowed if holds(reader.dtype(narrowed)) else reader.complete(weight)
    stored = dtype(reader.dtype(ref))
    steps: list[Step] = [] if stored == kind else [Cast(kind.name)]
    shards = [step for step in ref.every_step() if isinstance(step, Shard)]
    axes = tuple(name for name in mesh.names if any(name in step.axes for step in shards))
    shape = reader.shape(ref)
    if mesh.group_size(axes) == 1:
        return _Source(ref, (), stored.name, shape, tuple(steps))
    if prod(shape) * stored.bits % 8:
        raise Error(
            f"weight @{weight.name} is {weight.type}, whose shards end within a byte; "
            "leave out --bundle"
        )
    ranks = tuple(mesh.groups(axes)[0])
    joined = (shape[0] * len(ranks), *shape[1:])
    return _Source(ref, ranks, stored.name, joined, (Shard(0, axes), *steps))


def _write(
    path: Path,
    header: bytes,
    placed: Mapping[str, Tensor],
    blocks: Iterable[bytes | memoryview],
    advance: Advance,
) -> str:
    """Write the file; its `sha256:...`, computed as the bytes are written."""
    size = sum((tensor.nbytes for tensor in placed.values()), len(header))
    check_space(path.parent, size)
    digest, done = hashlib.sha256(), 0
    with open(path, "wb") as out:
        for block in chain([header], blocks):
            done += out.write(block)
            digest.update(block)
            advance(done / size)
    return f"sha256:{digest.hexdigest()}"


def _blocks(reader: Reader, sources: Mapping[str, _Source]) -> Iterator[bytes | memoryview]:
    """The bytes of all tensors in blocks: of each the shard of one rank after the other."""
    shards = [
        (s, rank, reader.extent(s.ref, rank)) for s in sources.values() for rank in s.ranks or (0,)
    ]
    computed = [(source.ref, [rank]) for source, rank, extent in shards if extent is None]
    stream = groupby(reader.stream(computed, as_bytes=True), itemgetter(0))
    for source, _, extent in shards:
        if extent is not None:
            yield from _read(extent)
        elif prod(source.shape):
            yield from (block.data for _, (block,) in next(stream)[1])


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
