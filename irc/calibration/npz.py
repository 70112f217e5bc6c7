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

Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]


@dataclass
class _Member:
    """An array of an archive, open at its first row."""

    file: IO[bytes]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The next elements."""
        data = self.file.read(math.prod(shape) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype).reshape(shape)


def npz_batches(
    path: Path, shapes: Mapping[str, Shape], rows: int
) -> Iterator[tuple[Arrays, float]]:
    """The batches of a file, and the fraction of it that has been read.

    `shapes` are those of the model's inputs. Arrays whose first dimension is the symbol of the
    first input, or a fixed number of rows, are cut into batches; the others are part of every
    batch. Arrays of different lengths are one batch.
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
    if not members or any(0 in member.shape for member in members.values()):
        raise Error(f"{path} has no arrays or an empty one; expected a row at least for each input")
    dims = {name: shapes[name][0] for name, m in members.items() if shapes.get(name) and m.shape}
    firsts = {name: ("", d, 0) if isinstance(d, int) else linear(d) for name, d in dims.items()}
    symbol = next((found[0] for found in firsts.values() if found is not None), None)
    cut = {n: f[1] for n, f in firsts.items() if f is not None and (f[0], f[2]) == (symbol, 0)}
    if symbol == "":  # the model has a fixed number of rows
        cut, rows = {n: size for n, size in cut.items() if members[n].shape[0] != size}, 1
    counts = {members[name].shape[0] // max(factor, 1) for name, factor in cut.items()}
    cut = cut if len(counts) == 1 else {}
    fixed = {n: member.read(member.shape) for n, member in members.items() if n not in cut}
    count = counts.pop() if cut else 1
    for begin in range(0, count, rows):
        size = min(rows, count - begin)
        shapes_now = {n: (size * factor, *members[n].shape[1:]) for n, factor in cut.items()}
        arrays = {name: members[name].read(shape) for name, shape in shapes_now.items()}
        yield arrays | fixed, (begin + size) / count
