"""Fills arrays from pieces: copies from mapped files, converts, releases pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from ...ir.dtypes import numpy_dtype, widened
from .. import BytesRef, FileRef, Ref
from ..safetensors import Tensor
from .files import Array, File
from .pieces import Piece

GROUP = 8 << 20  # bytes of rows that are copied at a time
TILE = 64  # rows that are transposed at a time, so that they stay in the cache

Opened: TypeAlias = Callable[[FileRef | BytesRef], tuple[File, Tensor]]
Elements: TypeAlias = Callable[[Ref, tuple[range, ...]], Array]


def convert(array: Array, dtype: str) -> Array:
    """`array` as another dtype, rounded to nearest even."""
    target = numpy_dtype(dtype)
    if array.dtype == target:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return widened(array).astype(target, copy=False)


def mapped(piece: Piece, opened: Opened) -> Array:
    """A piece that needs no conversion, as a view of the mapped bytes."""
    assert isinstance(piece.source, (FileRef, BytesRef))
    file, tensor = opened(piece.source)
    array = file.part(tensor, piece.picks)
    array = array.transpose([i for i in piece.order if i is not None])
    return array[tuple(np.newaxis if i is None else slice(None) for i in piece.order)]


def fill(out: Array, pieces: Iterable[Piece], opened: Opened, other: Elements) -> None:
    """Write pieces to their boxes of an array, whose dtype is that after all casts.

    `opened` opens sources in files, `other` has the elements of any other source.
    """
    for piece in pieces:
        box = tuple(slice(*part) for part in piece.box)
        if piece.source is None:
            out[box] = np.zeros((), out.dtype)  # a 0 of bits: f8e8m0 has no number 0
            continue
        target = out[(*box, ...)]
        target = target[(*(0 if i is None else slice(None) for i in piece.order), ...)]
        kept = [i for i in piece.order if i is not None]
        target = target.transpose([kept.index(i) for i in range(len(kept))])
        if isinstance(piece.source, (FileRef, BytesRef)):
            _copy(target, piece, *opened(piece.source))
        else:
            target[...] = _cast(other(piece.source, piece.picks), piece)


def _copy(target: Array, piece: Piece, file: File, tensor: Tensor) -> None:
    """Copy a group of rows at a time, so that few pages of the file are resident."""
    if not piece.picks:
        target[...] = _cast(file.part(tensor, ()), piece)
        return
    rows = piece.picks[0]
    size = max(1, tensor.nbytes // tensor.shape[0])
    count = max(1, GROUP // (size * rows.step))
    if not target.flags.c_contiguous and target.ndim > 1 and target.strides[-1] > target.strides[0]:
        count = min(count, TILE)
    for at in range(0, len(rows), count):
        group = rows[at : at + count]
        part = file.part(tensor, (group, *piece.picks[1:]))
        target[at : at + count] = _cast(part, piece)
        end = min((group[-1] + 1) * size, tensor.nbytes)
        file.touched(tensor.offset + min(group[0] * size, end), tensor.offset + end)


def _cast(array: Array, piece: Piece) -> Array:
    for dtype in piece.casts:
        array = convert(array, dtype)
    return array
