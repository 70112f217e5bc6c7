"""Batches of the arrays in .npz files, read row by row, so that no file is whole in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import Error
from ..ir.dims import Shape, linear
from ..npz import Arrays, Member, open_npz, read_whole


def npz_batches(
    path: Path, shapes: Mapping[str, Shape], rows: int
) -> Iterator[tuple[Arrays, float]]:
    """The batches of a file, and the fraction of it that has been read.

    `shapes` are those of the model's inputs. Arrays whose first dimension is the symbol of the
    first input, or a fixed number of rows, are cut into batches; the others are part of every
    batch. Arrays of different lengths are one batch.
    """
    with open_npz(path) as members:
        yield from _batches(path, members, shapes, rows)


def _batches(
    path: Path, members: Mapping[str, Member], shapes: Mapping[str, Shape], rows: int
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
    for member in (members[name] for name in cut):
        if member.is_fortran and len(member.shape) > 1:
            raise Error(f"{path} has an array in Fortran order; save numpy.ascontiguousarray of it")
    fixed = read_whole(path, [member for name, member in members.items() if name not in cut])
    count = counts.pop() if cut else 1
    for begin in range(0, count, rows):
        size = min(rows, count - begin)
        shapes_now = {n: (size * factor, *members[n].shape[1:]) for n, factor in cut.items()}
        arrays = {name: members[name].read(shape) for name, shape in shapes_now.items()}
        yield arrays | fixed, (begin + size) / count
