"""One safetensors file with every weight of a module, so that an artifact stands alone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from .checkpoint import Extent, Reader
from .core import Module, Weight
from .dtypes import dtype
from .errors import Error
from .safetensors import holds, lay_out
from .weights import Cast, FileRef, RandomRef, Ref

FILE = "weights"  # what the module calls the file
COPY = 8 << 20  # bytes in one call of the system
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)

Advance: TypeAlias = Callable[[float], None]  # told the fraction that is written


@contextmanager
def bundled(module: Module, path: Path, advance: Advance = lambda done: None) -> Generator[None]:
    """Write every weight to `path`; inside, the module refers to that file, by its name alone.

    Keys are the names of the weights. What a cast widens is written narrow, as the checkpoint has
    it, and cast when it is read. A module without weights gets no file.
    """
    if not module.weights:
        yield
        return
    files, refs = module.files, {weight: weight.ref for weight in module.weights.values()}
    reader = Reader(module)
    sources = {weight: _source(weight, reader) for weight in refs}
    _write(path, reader, {w.name: source for w, (source, _) in sources.items()}, advance)
    try:
        module.files = {FILE: path.name}
        for weight, (_, casts) in sources.items():
            weight.ref = FileRef(FILE, weight.name, steps=casts)
        yield
    finally:
        module.files = files
        for weight, ref in refs.items():
            weight.ref = ref


def _source(weight: Weight, reader: Reader) -> tuple[Weight | Ref, tuple[Cast, ...]]:
    """(what to write, the cast that is left to the reader; casts and cuts commute)."""
    reader.check(weight)
    kind = dtype(weight.type.dtype)
    if not holds(kind.name):
        raise Error(
            f"weight @{weight.name} is {kind.name}, which a safetensors file cannot hold; "
            "leave out --bundle"
        )
    steps = weight.ref.steps
    casts = [i for i, step in enumerate(steps) if isinstance(step, Cast)]
    if not casts or isinstance(weight.ref, RandomRef):
        return weight, ()
    source = replace(weight.ref, steps=(*steps[: casts[-1]], *steps[casts[-1] + 1 :]))
    narrow = dtype(reader.dtype(source))
    if narrow.bits >= kind.bits or not holds(narrow.name):
        return weight, ()
    return source, (Cast(kind.name),)


def _write(
    path: Path, reader: Reader, sources: Mapping[str, Weight | Ref], advance: Advance
) -> None:
    header, placed = lay_out({k: (reader.dtype(s), reader.shape(s)) for k, s in sources.items()})
    size = sum((tensor.nbytes for tensor in placed.values()), len(header))
    with open(path, "wb") as out:
        out.write(header)
        for key, tensor in placed.items():
            out.flush()
            extent = reader.extent(sources[key])
            if extent is not None:
                _copy(extent, out.fileno(), tensor.offset)
                out.seek(tensor.offset + tensor.nbytes)
            else:
                for block in reader.stream(sources[key]):
                    out.write(block.tobytes())
            advance((tensor.offset + tensor.nbytes) / size)


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
