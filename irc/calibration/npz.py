"""Batches of the arrays in .npz files, read row by row, so that no file is whole in memory."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy

from ..errors import Error
from ..ir.dims import Shape, linear

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]


@dataclass
class _Member:
    """An array of an archive, open at its first row."""

    file: IO[bytes]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, rows: int) -> Array:
        """The next rows."""
        shape = (rows, *self.shape[1:])
        data = self.file.read(math.prod(shape) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype).reshape(shape)

    def whole(self) -> Array:
        data = self.file.read(math.prod(self.shape) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype).reshape(self.shape)


def npz_batches(
    path: Path, shapes: Mapping[str, Shape], rows: int
) -> Iterator[tuple[Arrays, float]]:
    """The batches of a file, and the fraction of it that has been read.

    `shapes` are those of the model's inputs. Arrays with one dimension more hold a batch per
    element of the first. Otherwise, arrays whose first dimension is the symbol of the batch are cut
    into batches of `rows`, or are one batch where they have different lengths. An array without
    that dimension is part of every batch.
    """
    try:
        with zipfile.ZipFile(path) as archive, ExitStack() as stack:
            members = {
                name.removesuffix(".npy"): _opened(stack.enter_context(archive.open(name)), path)
                for name in archive.namelist()
            }
            yield from _batches(path, members, shapes, rows)
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise Error(
            f"{path} is no .npz archive of plain arrays ({error}); write it with numpy.savez"
        ) from None


def _opened(file: IO[bytes], path: Path) -> _Member:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.kind not in "fiub":
        raise Error(f"{path} has an array of {dtype}; expected numbers (bf16 as f32)")
    if fortran and len(shape) > 1:
        raise Error(f"{path} has an array in Fortran order; save numpy.ascontiguousarray of it")
    return _Member(file, shape, dtype)


def _batches(
    path: Path, members: Mapping[str, _Member], shapes: Mapping[str, Shape], rows: int
) -> Iterator[tuple[Arrays, float]]:
    if not members:
        raise Error(f"{path} has no arrays; expected one per input of the model")
    known = {name: len(shapes.get(name, m.shape)) for name, m in members.items()}
    stacked = [name for name, m in members.items() if len(m.shape) == known[name] + 1]
    factors = dict.fromkeys(stacked, 0) or _leading(members, shapes)
    counts = {name: members[name].shape[0] // max(factors[name], 1) for name in factors}
    if stacked and len(set(counts.values())) > 1:
        raise Error(f"{path} has different numbers of batches: {_listed(counts)}; expected one")
    if 0 in counts.values() or any(0 in m.shape for m in members.values()):
        raise Error(f"{path} has an empty array; expected at least one row")
    if len(set(counts.values())) != 1:
        yield {name: member.whole() for name, member in members.items()}, 1.0
        return
    fixed = {name: member.whole() for name, member in members.items() if name not in factors}
    count = next(iter(counts.values()))
    step = 1 if stacked else rows
    for begin in range(0, count, step):
        size = min(step, count - begin)
        arrays = {name: members[name].read(size * max(factors[name], 1)) for name in factors}
        found = {name: array[0] if stacked else array for name, array in arrays.items()}
        yield found | fixed, (begin + size) / count


def _leading(members: Mapping[str, _Member], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The arrays whose first dimension is that of the batch, times a factor, by that factor."""
    firsts = {name: linear(shapes[name][0]) for name in members if shapes.get(name)}
    symbol = next((found[0] for found in firsts.values() if found is not None), None)
    return {
        name: found[1]
        for name, found in firsts.items()
        if found is not None and found[0] == symbol and not found[2]
    }


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
