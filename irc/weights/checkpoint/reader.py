"""`Reader`: regions, streams and file extents of weights, on any rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from ...errors import Error, did_you_mean
from ...ir.core import Module, Weight
from ...ir.dtypes import dtype as dtype_called
from ...ir.dtypes import numpy_dtype, packed
from .. import BytesRef, Cast, ComputedRef, ConcatRef, FileRef, RandomRef, Ref, UnboundRef, ZerosRef
from ..computed import AT_ONCE
from ..safetensors import Tensor
from ..sources import ref_dtype, shape_before, shapes_of, stated
from .files import Array, Extent, File
from .fill import fill, mapped
from .pieces import Piece, Range, pieces_of
from .random_blocks import RandomBlocks
from .read_cache import ReadCache
from .streams import ahead, regions

STORED = (FileRef, BytesRef)  # sources in a file
BLOCK = 4 << 20  # bytes in one item of a stream, for all ranks together
SMALL = 1 << 18  # elements of a computed result that is kept


class Reader:
    """Reads the weights of a module. Files are opened at first use; paths are relative to `base`.

    Methods take a Weight or its reference; a random reference without a shape needs the Weight,
    whose type has the shape. Results of methods without a rank are equal on all ranks.
    """

    def __init__(self, module: Module, base: str | os.PathLike[str] | None = None) -> None:
        self._module, self._base = module, os.fspath(base or "")
        self._files: dict[tuple[str, bool], File] = {}
        self._numbers = RandomBlocks(4 * BLOCK)
        self._results = ReadCache(4 * BLOCK)

    def path(self, file: str) -> str:
        """The path of the file named `file` in the module."""
        return os.path.join(self._base, self._module.files[file])

    def file(self, file: str, checkpoint: bool = True) -> File:
        """The opened file named `file` in the module, with its header if it is a checkpoint."""
        key = self.path(file), checkpoint
        if key not in self._files:
            self._files[key] = File(*key)
        return self._files[key]

    def info(self, file: str, key: str) -> Tensor:
        """The header entry of a tensor; an Error names the nearest key."""
        tensors = self.file(file).tensors
        if key not in tensors:
            near = did_you_mean(key, tensors)
            raise Error(f"{self.path(file)} has no tensor called {key!r}{near}")
        return tensors[key]

    def known(self, source: Ref) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of a source without steps; opens its file."""
        if isinstance(source, (FileRef, BytesRef)):
            _, tensor = self._opened(source)
            return tensor.shape, dtype_called(tensor.dtype).name
        shape, dtype = stated(source)
        if isinstance(source, UnboundRef):
            raise _unbound(source)
        if shape is None:
            raise _shapeless(source)
        return shape, dtype or "f32"

    @staticmethod
    def complete(weight: Weight | Ref) -> Ref:
        """The reference of a weight; a random one gets the weight's shape and dtype."""
        if not isinstance(weight, Weight):
            return weight
        ref = weight.ref
        if not isinstance(ref, RandomRef):
            return ref
        if not any(isinstance(step, Cast) for step in ref.steps):
            ref = replace(ref, steps=(*ref.steps, Cast(weight.type.dtype)))
        if ref.shape is not None:
            return ref
        shape = tuple(size for size in weight.type.shape if isinstance(size, int))
        if len(shape) != weight.type.ndim:
            raise Error(f"{ref} has a symbolic shape; a weight's sizes are numbers")
        shape = shape_before(shape, ref)
        if shape is None:
            raise _shapeless(ref)
        return replace(ref, shape=shape)

    def shape(self, weight: Weight | Ref) -> tuple[int, ...]:
        """The shape after all steps."""
        return self._shapes(self.complete(weight))[-1]

    def dtype(self, weight: Weight | Ref) -> str:
        """The dtype after all steps."""
        ref = self.complete(weight)
        dtype = ref_dtype(ref, self.known)
        if dtype is None:
            raise Error(f"{ref} joins no references, so its dtype is unknown")
        return dtype

    def check(self, weight: Weight) -> None:
        """Raise an Error unless the checkpoint has the shape and dtype of the weight's type."""
        shape, dtype = self.shape(weight), self.dtype(weight)
        if shape != weight.type.shape or dtype != weight.type.dtype:
            held = f"{dtype}[{', '.join(map(str, shape))}]"
            raise Error(f"weight @{weight.name} is {weight.type}, but {weight.ref} is {held}")

    def check_copied(self, weights: Iterable[Weight | Ref]) -> None:
        """An Error where a copy of weights would copy bytes of a `foreign` file of the module."""
        for weight in weights:
            for name in self.complete(weight).files():
                if name in self._module.foreign:
                    what = f"@{weight.name}" if isinstance(weight, Weight) else str(weight)
                    raise Error(
                        f"the artifact would get a copy of {what} from {self.path(name)}, which "
                        "the source names and which is not in its folder; name the folder of the "
                        "weights with --checkpoint, or give --trust if you wrote the source or "
                        "trust who did"
                    )

    def read(self, weight: Weight | Ref, rank: int = 0) -> Array:
        """All of one rank's tensor; a view of the file where nothing is converted."""
        return self.region(weight, [(0, size) for size in self.shape(weight)], rank)

    def region(self, weight: Weight | Ref, ranges: Sequence[Range], rank: int = 0) -> Array:
        """A region (begin, end per dimension) of one rank's tensor."""
        pieces = self.pieces(weight, rank)
        parts = [part for piece in pieces if (part := piece.within(ranges))]
        sole = parts[0] if len(parts) == 1 else None
        if sole is not None and isinstance(sole.source, STORED) and self._is_view(sole):
            return mapped(sole, self._opened)
        array = np.empty([end - begin for begin, end in ranges], numpy_dtype(self.dtype(weight)))
        self._fill(array, pieces, ranges)
        self._release()
        return array

    def elements(self, ref: Ref, picks: tuple[range, ...]) -> Array:
        """The elements of a reference without shards, at indices of every dimension."""
        if isinstance(ref, ComputedRef) and not ref.steps and all(picks):
            return self._source_elements(ref, picks)
        array = np.empty([*map(len, picks)], numpy_dtype(self.dtype(ref)))
        pieces = pieces_of(ref, self._module.mesh, 0, self._shapes, picks)
        fill(array, pieces, self._opened, self._source_elements)
        return array

    def once(self, key: Hashable, compute: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        """Arrays that several regions need, computed by the first of them."""
        return self._results.get(key, compute)

    def stream(
        self, tensors: Iterable[tuple[Weight | Ref, Sequence[int]]], as_bytes: bool = False
    ) -> Iterator[tuple[int, list[Array]]]:
        """(number of the tensor, its next block of every rank), tensor by tensor, in row-major
        order; threads compute the next blocks meanwhile.

        Shards of the same rows are read together. The blocks of one item have about BLOCK bytes in
        total; ranks with equal tensors get the same array. `as_bytes`: as the bytes of a file,
        where a byte holds two elements of four bits.
        """
        try:
            yield from ahead(
                task
                for number, (weight, ranks) in enumerate(tensors)
                for task in self._tasks(number, weight, ranks, as_bytes)
            )
        finally:
            self._release()

    def _tasks(
        self, number: int, weight: Weight | Ref, ranks: Sequence[int], as_bytes: bool
    ) -> Iterator[Callable[[], tuple[int, list[Array]]]]:
        """What computes each block of a tensor."""
        every = [self.pieces(weight, rank) for rank in ranks]
        distinct = list(dict.fromkeys(every))
        places = [distinct.index(pieces) for pieces in every]
        name = self.dtype(weight)
        kind, is_packed = numpy_dtype(name), as_bytes and dtype_called(name).bits < 8
        limit = BLOCK // kind.itemsize // max(1, len(distinct))
        limit = max(1, min(limit, AT_ONCE // self._input_elements(self.complete(weight))))

        def task(ranges: list[Range]) -> tuple[int, list[Array]]:
            # one array for all ranks, whose memory the allocator reuses for the next block
            blocks = np.empty([len(distinct), *(end - begin for begin, end in ranges)], kind)
            for i, pieces in enumerate(distinct):
                self._fill(blocks[i, ...], pieces, ranges)
            encoded = list(blocks)
            if as_bytes:
                encoded = [block.reshape(-1) for block in blocks]
                encoded = [
                    packed(block) if is_packed else block.view(np.uint8) for block in encoded
                ]
            return number, [encoded[place] for place in places]

        for ranges in regions(self.shape(weight), limit, is_packed):
            yield partial(task, ranges)

    def extent(self, weight: Weight | Ref, rank: int = 0) -> Extent | None:
        """The bytes in a file of one rank's tensor, None if scattered or converted."""
        extents = self.extents(weight, rank)
        return replace(extents[0], shape=self.shape(weight)) if len(extents) == 1 else None

    def extents(self, weight: Weight | Ref, rank: int = 0) -> list[Extent]:
        """The bytes in files of one rank's tensor in order, none if scattered or converted.

        There are several where tensors are joined by rows.
        """
        shape, done = self.shape(weight), 0
        extents: list[Extent] = []
        for piece in sorted(self.pieces(weight, rank), key=lambda piece: piece.box):
            run = self._run(piece)
            if run is None or done != _first(piece.box, shape):  # the order is not row-major
                return []
            done += prod(run.shape)
            last = extents[-1] if extents else run
            if (last.path, last.offset + last.nbytes) == (run.path, run.offset):
                extents[-1] = replace(last, nbytes=last.nbytes + run.nbytes)
            else:
                extents.append(run)
        return extents

    def narrowed(self, weight: Weight | Ref) -> Ref:
        """The reference without lossless widening casts at its end, which takes fewest bytes."""
        ref = self.complete(weight)
        casts = [i for i, step in enumerate(ref.steps) if isinstance(step, Cast)]
        if casts:
            less = replace(ref, steps=(*ref.steps[: casts[-1]], *ref.steps[casts[-1] + 1 :]))
            return self.narrowed(less) if _widens(self.dtype(less), self.dtype(ref)) else ref
        if not isinstance(ref, ConcatRef):
            return ref
        parts = [self.narrowed(part) for part in ref.parts]
        kinds = {self.dtype(part) for part in parts if not isinstance(part, ZerosRef)}
        if len(kinds) != 1:
            return ref
        (kind,) = kinds
        return replace(ref, parts=tuple(_zeros_as(part, kind) for part in parts))

    def pieces(self, weight: Weight | Ref, rank: int = 0) -> tuple[Piece, ...]:
        """The pieces of one rank's tensor; none if it has no elements."""
        return pieces_of(self.complete(weight), self._module.mesh, rank, self._shapes)

    def _shapes(self, ref: Ref) -> list[tuple[int, ...]]:
        """The shape of the source and after every step."""
        shapes = shapes_of(ref, self._module.mesh, self.known)
        if not shapes:
            raise Error(f"the shape of {ref} is not known")
        return shapes

    def _opened(self, ref: FileRef | BytesRef) -> tuple[File, Tensor]:
        """The file of a source, and the tensor's place in it."""
        if isinstance(ref, BytesRef):
            return self._region(ref)
        return self.file(ref.file), self.info(ref.file, ref.key)

    def _region(self, ref: BytesRef) -> tuple[File, Tensor]:
        file = self.file(ref.file, checkpoint=False)
        size = dtype_called(ref.dtype).nbytes(prod(ref.shape))
        if ref.offset + size > file.size:
            raise Error(
                f"{ref} ends at byte {ref.offset + size}, but {file.path} has {file.size}: "
                "it is truncated, or not the file that the module was made with"
            )
        return file, Tensor(ref.dtype, ref.shape, ref.offset, size)

    def _fill(self, out: Array, pieces: Iterable[Piece], ranges: Sequence[Range]) -> None:
        """Write a region of the tensor to `out`."""
        parts = (piece.within(ranges) for piece in pieces)
        fill(out, filter(None, parts), self._opened, self._source_elements)

    def _source_elements(self, source: Ref, picks: tuple[range, ...]) -> Array:
        """The elements of a source that is in no file."""
        if isinstance(source, RandomRef):
            return self._numbers.region(source, picks)
        assert isinstance(source, ComputedRef)
        if prod(map(len, picks)) > SMALL:
            return source.compute(self, picks)
        return self.once((source, picks), lambda: (source.compute(self, picks),))[0]

    def _input_elements(self, ref: Ref) -> int:
        """About how many elements are read to compute one."""
        most = max(map(self._input_elements, ref.inputs), default=1)
        if not isinstance(ref, ComputedRef):
            return most
        return most * max(1, ref.input_elements([self.shape(part) for part in ref.inputs]))

    def _release(self) -> None:
        self._numbers.clear()
        for file in self._files.values():
            file.release()

    def _changed(self, piece: Piece) -> bool:
        """Whether the casts of a piece change anything."""
        assert piece.source is not None
        return any(cast != self.known(piece.source)[1] for cast in piece.casts)

    def _is_view(self, piece: Piece) -> bool:
        """Whether a view of the file has the elements."""
        assert piece.source is not None
        return not self._changed(piece) and dtype_called(self.known(piece.source)[1]).bits >= 8

    def _run(self, piece: Piece) -> Extent | None:
        """The bytes of one piece, if they are contiguous in a file and not converted."""
        if not isinstance(piece.source, STORED) or self._changed(piece):
            return None
        file, tensor = self._opened(piece.source)
        kept = [i for i in piece.order if i is not None and len(piece.picks[i]) > 1]
        dense = all(part.step == 1 for part in piece.picks)
        box = tuple((part.start, part.stop) for part in piece.picks)
        if not dense or kept != sorted(kept) or not _is_run(box, tensor.shape):
            return None
        shape = tuple(map(len, piece.picks))
        kind = dtype_called(tensor.dtype)
        before, inside = _first(box, tensor.shape), prod(shape)
        if before * kind.bits % 8 or inside * kind.bits % 8:
            return None
        offset = tensor.offset + kind.nbytes(before)
        return Extent(file.path, offset, kind.nbytes(inside), tensor.dtype, shape)


def _shapeless(ref: Ref) -> Error:
    return Error(f"{ref} is sliced or joined, so it needs a shape: random(..., [4, 8])")


def _unbound(ref: UnboundRef) -> Error:
    return Error(
        f"the parameter {ref.key!r} has no values; compile the model with --checkpoint DIR or "
        "--random-weights SEED, and use the artifact"
    )


def _zeros_as(ref: Ref, dtype: str) -> Ref:
    """Zeros in another dtype; any other reference is returned unchanged."""
    if not isinstance(ref, ZerosRef):
        return ref
    steps = tuple(step for step in ref.steps if not isinstance(step, Cast))
    return replace(ref, dtype=dtype, steps=steps)


def _widens(source: str, target: str) -> bool:
    """Whether a cast keeps every value, the zeros of padding too, and increases the size."""
    if source == "f8e8m0":
        return False
    less = dtype_called(source).bits < dtype_called(target).bits
    return less and np.can_cast(numpy_dtype(source), numpy_dtype(target), "safe")


def _is_run(box: Sequence[Range], shape: tuple[int, ...]) -> bool:
    """Whether a region is contiguous: single indices, then one range, then complete dimensions."""
    sizes = [end - begin for begin, end in box]
    first = next((i for i, size in enumerate(sizes) if size != 1), len(sizes))
    return tuple(sizes[first + 1 :]) == shape[first + 1 :]


def _first(box: Sequence[Range], shape: tuple[int, ...]) -> int:
    """The row-major index of a region's first element."""
    at = 0
    for (begin, _), size in zip(box, shape, strict=True):
        at = at * size + begin
    return at
