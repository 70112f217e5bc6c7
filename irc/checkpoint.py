"""Bytes of weights: any region of a reference, read from checkpoint files a block at a time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product as combinations
from math import prod
from typing import Any, TypeAlias

import numpy as np

from .core import Module, Weight
from .dims import Shape
from .dtypes import dtype as dtype_called
from .dtypes import numpy_dtype, widened
from .errors import Error, did_you_mean
from .safetensors import Tensor, read_header
from .weights import (
    Cast,
    ConcatRef,
    FileRef,
    RandomRef,
    Ref,
    Shard,
    Slice,
    Transpose,
    UnboundRef,
    step_shape,
)

Array: TypeAlias = np.ndarray[Any, Any]
Range: TypeAlias = tuple[int, int]  # begin, end
BLOCK = 8 << 20  # bytes that a stream holds at a time
_RANDOM_ROWS = 64  # rows that share one generator, so that a slice of rows costs its own blocks


@dataclass(frozen=True)
class Extent:
    """Contiguous bytes of a file which are, as they lie, the elements of a tensor."""

    path: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class File:
    """An open checkpoint file: its header and its bytes, mapped and not read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tensors = read_header(path)
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, tensor: Tensor) -> Array:
        """The tensor as an array over the mapped bytes."""
        kind = numpy_dtype(tensor.dtype)
        flat = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return flat.view(kind).reshape(tensor.shape)

    def release(self, begin: int, end: int) -> None:
        """Let the system take the pages of a range back, so that a stream leaves none behind."""
        page = mmap.PAGESIZE
        first = begin // page * page
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


class Reader:
    """The weights of a module. Files are opened when first used; paths are relative to `base`.

    Every method takes a Weight or its reference. Random references need the Weight: the type says
    their shape and dtype.
    """

    def __init__(self, module: Module, base: str | os.PathLike[str] | None = None) -> None:
        self._module, self._base = module, os.fspath(base or "")
        self._files: dict[str, File] = {}

    def path(self, file: str) -> str:
        """Where the file called `file` in the module lies."""
        return os.path.join(self._base, self._module.files[file])

    def file(self, file: str) -> File:
        """The opened file called `file` in the module."""
        path = self.path(file)
        if path not in self._files:
            self._files[path] = File(path)
        return self._files[path]

    def info(self, file: str, key: str) -> Tensor:
        """The header entry of a tensor; an Error names the nearest key."""
        tensors = self.file(file).tensors
        if key not in tensors:
            near = did_you_mean(key, tensors)
            raise Error(f"{self.path(file)} has no tensor called {key!r}{near}")
        return tensors[key]

    def shape(self, weight: Weight | Ref) -> tuple[int, ...]:
        """The shape after all steps."""
        ref, wanted = _parts(weight)
        return self._shapes(ref, wanted)[-1]

    def dtype(self, weight: Weight | Ref) -> str:
        """The dtype after all steps."""
        ref, wanted = _parts(weight)
        for step in reversed(ref.steps):
            if isinstance(step, Cast):
                return step.dtype
        match ref:
            case FileRef():
                return dtype_called(self.info(ref.file, ref.key).dtype).name
            case ConcatRef():
                return _common([self.dtype(part) for part in ref.parts], ref)
            case _:
                return wanted[1] if wanted is not None else "f32"

    def check(self, weight: Weight) -> None:
        """An Error where the checkpoint does not hold what the weight's type says."""
        shape, dtype = self.shape(weight), self.dtype(weight)
        if shape != weight.type.shape or dtype != weight.type.dtype:
            held = f"{dtype}[{', '.join(map(str, shape))}]"
            raise Error(f"weight @{weight.name} is {weight.type}, but {weight.ref} is {held}")

    def read(self, weight: Weight | Ref, rank: int = 0) -> Array:
        """The whole tensor of one rank: a view of the file where nothing is converted."""
        shape = self.shape(weight)
        return self._region(weight, rank, [(0, size) for size in shape], False)

    def stream(self, weight: Weight | Ref, rank: int = 0) -> Iterator[Array]:
        """The elements in row-major order, as contiguous arrays of about BLOCK bytes."""
        item = numpy_dtype(self.dtype(weight)).itemsize
        for ranges in _blocks(self.shape(weight), max(1, BLOCK // item)):
            yield np.ascontiguousarray(self._region(weight, rank, ranges, True))

    def extent(self, weight: Weight | Ref, rank: int = 0) -> Extent | None:
        """The bytes in the file, if they are contiguous and need no conversion, else None."""
        ref, wanted = _parts(weight)
        shapes = self._shapes(ref, wanted)
        if isinstance(ref, ConcatRef) and not ref.steps:
            return self._joined([self.extent(part, rank) for part in ref.parts], ref, shapes[-1])
        if not isinstance(ref, FileRef) or not prod(shapes[-1]):
            return None
        tensor = self.info(ref.file, ref.key)
        whole = [(0, size) for size in shapes[-1]]
        ranges, after = _pull_back(ref, shapes, whole, self._module, rank)
        idle = sum(step == Cast(tensor.dtype) for step in ref.steps)
        if len(after) > idle or not _contiguous(ranges, tensor.shape):
            return None
        first = int(np.ravel_multi_index([b for b, _ in ranges], tensor.shape)) if ranges else 0
        item = numpy_dtype(tensor.dtype).itemsize
        size = prod(shapes[-1]) * item
        path = self.path(ref.file)
        return Extent(path, tensor.offset + first * item, size, tensor.dtype, shapes[-1])

    def _joined(
        self, parts: list[Extent | None], ref: ConcatRef, shape: tuple[int, ...]
    ) -> Extent | None:
        """Parts that lie one after the other in one file are one extent."""
        first = parts[0]
        if first is None or prod(shape[: ref.dim]) != 1:
            return None
        end, total = first.offset, 0
        for part in parts:
            if part is None or (part.path, part.offset, part.dtype) != (
                first.path,
                end,
                first.dtype,
            ):
                return None
            end, total = end + part.nbytes, total + part.nbytes
        return Extent(first.path, first.offset, total, first.dtype, shape)

    def _shapes(self, ref: Ref, wanted: tuple[Shape, str] | None) -> list[tuple[int, ...]]:
        """The shape of the source and after every step."""
        shapes: list[Any] = [self._source_shape(ref, wanted)]
        for step in ref.steps:
            shapes.append(step_shape(shapes[-1], step, self._module.mesh, ref))
        return shapes

    def _source_shape(self, ref: Ref, wanted: tuple[Shape, str] | None) -> tuple[int, ...]:
        match ref:
            case FileRef():
                return self.info(ref.file, ref.key).shape
            case ConcatRef():
                return _concat_shape([self.shape(part) for part in ref.parts], ref)
            case RandomRef():
                return self._random_shape(ref, wanted)
            case _:
                raise _unbound(ref)

    def _random_shape(self, ref: RandomRef, wanted: tuple[Shape, str] | None) -> tuple[int, ...]:
        """The shape it says, or the weight's own with the steps undone."""
        if ref.shape is not None:
            return ref.shape
        if wanted is None or any(isinstance(step, (Slice, Shard)) for step in ref.steps):
            raise Error(f"{ref} is cut or joined, so it has to say its shape: random(..., [4, 8])")
        shape = tuple(size for size in wanted[0] if isinstance(size, int))
        if len(shape) != len(wanted[0]):
            raise Error(f"{ref} has a symbolic shape; a weight's sizes are numbers")
        for step in reversed(ref.steps):
            if isinstance(step, Transpose):
                shape = tuple(shape[step.order.index(i)] for i in range(len(shape)))
        return shape

    def _region(
        self, weight: Weight | Ref, rank: int, ranges: Sequence[Range], release: bool
    ) -> Array:
        """Part of a tensor. With `release`, pages of the file that were touched are given back."""
        ref, wanted = _parts(weight)
        shapes = self._shapes(ref, wanted)
        ranges, after = _pull_back(ref, shapes, ranges, self._module, rank)
        array = self._source(ref, rank, ranges, shapes[0], release)
        for change in after:
            array = change(array)
        if wanted is not None and isinstance(ref, RandomRef):
            array = convert(array, wanted[1])
        return array

    def _source(
        self, ref: Ref, rank: int, ranges: Sequence[Range], shape: tuple[int, ...], release: bool
    ) -> Array:
        match ref:
            case FileRef():
                view = self.file(ref.file).view(self.info(ref.file, ref.key))
                if release:
                    return self._copied(ref, view, ranges)
                return view[tuple(slice(*r) for r in ranges)]
            case ConcatRef():
                return self._concat_region(ref, rank, ranges, release)
            case RandomRef():
                return _random(ref, shape, ranges)
            case _:
                raise _unbound(ref)

    def _copied(self, ref: FileRef, view: Array, ranges: Sequence[Range]) -> Array:
        """A copy of a region, made a group of rows at a time."""
        out = np.empty([e - b for b, e in ranges], view.dtype)
        if not out.size or not ranges:
            out[...] = view[tuple(slice(*r) for r in ranges)]
            return out
        file, tensor = self.file(ref.file), self.info(ref.file, ref.key)
        row = tensor.nbytes // tensor.shape[0]
        rest = tuple(slice(*r) for r in ranges[1:])
        begin, end = ranges[0]
        step = max(1, BLOCK // row)
        for at in range(begin, end, step):
            stop = min(at + step, end)
            out[at - begin : stop - begin] = view[(slice(at, stop), *rest)]
            file.release(tensor.offset + at * row, tensor.offset + stop * row)
        return out

    def _concat_region(
        self, ref: ConcatRef, rank: int, ranges: Sequence[Range], release: bool
    ) -> Array:
        """The parts that a region meets, joined."""
        begin, end = ranges[ref.dim]
        pieces: list[Array] = []
        at = 0
        for part in ref.parts:
            size = self.shape(part)[ref.dim]
            first, last = max(begin - at, 0), min(end - at, size)
            if first < last or begin == end == at:
                inner = [*ranges[: ref.dim], (first, max(first, last)), *ranges[ref.dim + 1 :]]
                pieces.append(self._region(part, rank, inner, release))
            at += size
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, ref.dim)


def convert(array: Array, dtype: str) -> Array:
    """`array` as another dtype, to nearest even; bf16 to f32 by moving its bits."""
    target = numpy_dtype(dtype)
    if array.dtype == target:
        return array
    if array.dtype == numpy_dtype("bf16") and dtype == "f32" and array.shape:
        wide = np.zeros((*array.shape, 2), "<u2")
        wide[..., 1] = array.view(np.uint16)
        return wide.view("<f4")[..., 0]
    with np.errstate(over="ignore", invalid="ignore"):
        return widened(array).astype(target, copy=False)


def _parts(weight: Weight | Ref) -> tuple[Ref, tuple[Shape, str] | None]:
    if isinstance(weight, Weight):
        return weight.ref, (weight.type.shape, weight.type.dtype)
    return weight, None


def _unbound(ref: Ref) -> Error:
    key = ref.key if isinstance(ref, UnboundRef) else str(ref)
    return Error(
        f"the parameter {key!r} has no values: give --checkpoint, or ask for random weights"
    )


def _common(dtypes: list[str], ref: ConcatRef) -> str:
    if len(set(dtypes)) != 1:
        raise Error(f"{ref} joins {' and '.join(sorted(set(dtypes)))}; cast the parts to one dtype")
    return dtypes[0]


def _concat_shape(shapes: list[tuple[int, ...]], ref: ConcatRef) -> tuple[int, ...]:
    rest = {(*s[: ref.dim], *s[ref.dim + 1 :]) for s in shapes}
    if len(rest) != 1 or not 0 <= ref.dim < len(shapes[0]):
        raise Error(f"{ref} joins tensors of shapes {', '.join(map(str, shapes))}")
    first = shapes[0]
    return (*first[: ref.dim], sum(s[ref.dim] for s in shapes), *first[ref.dim + 1 :])


def _pull_back(
    ref: Ref,
    shapes: Sequence[tuple[int, ...]],
    ranges: Sequence[Range],
    module: Module,
    rank: int,
) -> tuple[list[Range], list[Callable[[Array], Array]]]:
    """A region after the steps as a region of the source, and what is still to be done to it."""
    after: list[Callable[[Array], Array]] = []
    now = list(ranges)
    for step, shape in zip(reversed(ref.steps), reversed(shapes[:-1]), strict=True):
        match step:
            case Cast(dtype):
                after.append(lambda a, dtype=dtype: convert(a, dtype))
            case Transpose(order):
                now = [now[order.index(i)] for i in range(len(order))]
                after.append(lambda a, order=order: a.transpose(order))
            case Slice(cuts):
                starts = [cut[0] if cut else 0 for cut in cuts]
                now = [(s + b, s + e) for s, (b, e) in zip(starts, now, strict=True)]
            case Shard(dim, axes):
                now[dim], missing = _shard(now[dim], shape[dim], module, axes, rank)
                if missing:
                    after.append(lambda a, dim=dim, missing=missing: _padded(a, dim, missing))
    return now, after[::-1]


def _shard(
    part: Range, size: int, module: Module, axes: tuple[str, ...], rank: int
) -> tuple[Range, int]:
    """(the range in the whole dimension, how many elements of padding follow)."""
    start = module.mesh.index(rank, axes) * -(-size // module.mesh.ways(axes))
    begin, end = min(start + part[0], size), min(start + part[1], size)
    return (begin, end), (part[1] - part[0]) - (end - begin)


def _padded(array: Array, dim: int, missing: int) -> Array:
    shape = [missing if i == dim else size for i, size in enumerate(array.shape)]
    return np.concatenate([array, np.zeros(shape, array.dtype)], dim)


def _contiguous(ranges: Sequence[Range], shape: tuple[int, ...]) -> bool:
    """Whether a region is one run of elements: single indices, one range, whole dimensions."""
    sizes = [e - b for b, e in ranges]
    first = next((i for i, size in enumerate(sizes) if size != 1), len(sizes))
    return tuple(sizes[first + 1 :]) == shape[first + 1 :]


def _blocks(shape: tuple[int, ...], limit: int) -> Iterator[list[Range]]:
    """Regions of at most `limit` elements that cover a shape in row-major order."""
    if not shape:
        yield []
        return
    cut = next((i for i in range(len(shape)) if prod(shape[i + 1 :]) <= limit), len(shape) - 1)
    step = max(1, limit // max(1, prod(shape[cut + 1 :])))
    inner = [(0, size) for size in shape[cut + 1 :]]
    for place in combinations(*map(range, shape[:cut])):
        for begin in range(0, shape[cut], step):
            here = (begin, min(begin + step, shape[cut]))
            yield [*[(i, i + 1) for i in place], here, *inner]


def _random(ref: RandomRef, shape: tuple[int, ...], ranges: Sequence[Range]) -> Array:
    """Normal numbers times the scale; block i of rows has a Philox generator of its own."""
    import hashlib

    digest = hashlib.sha256(f"{ref.seed}:{ref.key}".encode()).digest()
    key = int.from_bytes(digest[:16], "little")
    rows, width = (shape[0], prod(shape[1:])) if shape else (1, 1)
    begin, end = ranges[0] if ranges else (0, 1)
    pieces: list[Array] = []
    for block in range(begin // _RANDOM_ROWS, -(-end // _RANDOM_ROWS)):
        first = block * _RANDOM_ROWS
        count = min(_RANDOM_ROWS, rows - first)
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, block, 0]))
        values = generator.standard_normal((count, width), np.float32)
        pieces.append(values[max(begin - first, 0) : end - first])
    found = np.concatenate(pieces) if pieces else np.zeros((0, width), np.float32)
    found = (found * np.float32(ref.scale)).reshape((end - begin, *shape[1:]) if shape else ())
    return found[(slice(None), *[slice(*r) for r in ranges[1:]])] if shape else found
