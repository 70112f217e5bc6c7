"""References whose elements are computed from those of others, a region at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.dtypes import dtype as dtype_called
from ..quantization.formats import (
    Format,
    Parts,
    Place,
    block_sizes,
    check_method,
    codes_of,
    find_scales,
    find_tensor_scale,
    format_called,
    grid_shape,
    tiles,
)
from ..quantization.packing import packing, unpack, words_shape
from ..quantization.rounding import as_f32
from .declare import Along, Dtype, Sizes, TypeDtype, TypeShape
from .sources import Ref
from .steps import Shard

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = tuple[Array, ...]
Picks: TypeAlias = tuple[range, ...]  # indices of every dimension

AT_ONCE = 1 << 20  # elements of an input that are read at a time
COMPUTED = ("f32", "f16", "bf16")


class Elements(Protocol):
    """Reads references without shards: inputs, or computed ones that a result depends on.

    Small computed results are kept, so that asking again is cheap. `once` keeps others by a key.
    """

    def shape(self, weight: Ref, /) -> Sizes: ...
    def dtype(self, weight: Ref, /) -> str: ...
    def elements(self, ref: Ref, picks: Picks, /) -> Array: ...
    def once(self, key: Hashable, compute: Callable[[], Arrays], /) -> Arrays: ...


@dataclass(frozen=True)
class ComputedRef(Ref):
    """A source computed from other references: its inputs, which hold no shards.

    Steps may follow as after any source, so every rank gets its part of one and the same tensor.
    """

    def __post_init__(self) -> None:
        for step in (step for part in self.inputs for step in part.every_step()):
            if isinstance(step, Shard):
                raise Error(f"{self}: {step} belongs after what is computed, not inside")

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        """The shape, by those of the inputs; that of the first by default."""
        return shapes[0]

    def source_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        """The dtype, by those of the inputs; that of the first by default."""
        return dtypes[0]

    def input_elements(self, shapes: Sequence[Sizes]) -> int:
        """About how many elements of the inputs are read for one element of the result."""
        return 1

    @abstractmethod
    def compute(self, read: Elements, picks: Picks) -> Array:
        """The elements at `picks`."""


def is_computed(ref: Ref) -> bool:
    """Whether any element is computed, not only moved or cast."""
    return isinstance(ref, ComputedRef) or any(map(is_computed, ref.inputs))


@dataclass(frozen=True)
class ProductRef(ComputedRef, keyword="multiply"):
    """`multiply(@ckpt["w"], @stats["s"]; 1)`: `source` times a vector along a dimension.

    Computed in f32 and rounded to the dtype of the source.
    """

    source: Ref
    factor: Ref
    dim: Along

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        shape, factor = shapes
        if not 0 <= self.dim < len(shape) or factor != (shape[self.dim],):
            shapes_text = f"a factor of {[*factor]} for {[*shape]}"
            raise Error(
                f"{self} has {shapes_text}; expected a number per element of dimension {self.dim}"
            )
        return shape

    def input_ndims(self, ndim: int) -> Sequence[int]:
        return ndim, 1

    def compute(self, read: Elements, picks: Picks) -> Array:
        values = read.elements(self.source, picks)
        factor = as_f32(read.elements(self.factor, (picks[self.dim],)))
        factor = factor.reshape([-1 if i == self.dim else 1 for i in range(len(picks))])
        with np.errstate(over="ignore", under="ignore"):
            return (as_f32(values) * factor).astype(values.dtype, copy=False)


@dataclass(frozen=True)
class LowRankSumRef(ComputedRef, keyword="low_rank_sum"):
    """`low_rank_sum(@ckpt["w"], @lora["b"], @lora["a"], 2.0)`: source + scale * left @ right.

    left [rows, r], right [r, columns]. The product is summed in f64, and the result rounded to f32,
    then to the dtype of the source.
    """

    source: Ref
    left: Ref
    right: Ref
    scale: float

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        shape, left, right = shapes
        if len(left) != 2 or shape != (*left[:1], *right[1:]) or left[1:] != right[:1]:
            raise Error(f"{self} adds {[*left]} @ {[*right]} to {[*shape]}; expected equal shapes")
        return shape

    def compute(self, read: Elements, picks: Picks) -> Array:
        values = read.elements(self.source, picks)
        inner = range(read.shape(self.right)[0])
        left = read.elements(self.left, (picks[0], inner)).astype(np.float64)
        right = read.elements(self.right, (inner, picks[1])).astype(np.float64)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            total = (self.scale * left) @ right
            total += as_f32(values)
            return total.astype(np.float32).astype(values.dtype, copy=False)


@dataclass(frozen=True)
class QuantizedRef(ComputedRef, keyword="quantized"):
    """`quantized(@ckpt["w"], "codes", "int4", [1, 128])`: a part of the quantized source.

    The part is "codes", in the shape of the source, "scales" or "zeros", with an element per block,
    or "tensor_scale". `block` is the size of a block per dimension, 0 for a complete dimension.
    Scales have the dtype `scale_dtype`, that of the source if empty, unless the format fixes one.
    """

    source: Ref
    part: str
    format: str
    block: Sizes
    method: str = "absmax"
    scale_dtype: Dtype = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_method(self.method)
        if self.scale_dtype:
            dtype_called(self.scale_dtype)
        if not self._part_dtype("f32"):
            raise Error(f"the format {self.format!r} has no part called {self.part!r}")

    @property
    def kind(self) -> Format:
        """The row of the format."""
        return format_called(self.format)

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        grid = grid_shape(shapes[0], self.block)
        if self.part == "codes":
            return shapes[0]
        return (1,) * len(grid) if self.part == "tensor_scale" else grid

    def source_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        if dtypes[0] not in (None, *COMPUTED):
            raise Error(f"{self} quantizes {dtypes[0]}; expected {', '.join(COMPUTED)}")
        return self._part_dtype(dtypes[0])

    def _part_dtype(self, source: str | None) -> str | None:
        """The dtype of the part; "" where the format has no such part."""
        kind = self.kind
        kinds = {
            "codes": kind.codes,
            "scales": kind.scales or self.scale_dtype or source,
            "zeros": kind.zeros,
            "tensor_scale": "f32" if kind.tensor_scale else "",
        }
        return kinds.get(self.part, "")

    def input_elements(self, shapes: Sequence[Sizes]) -> int:
        if self.part == "codes":
            return 1
        return prod(shapes[0]) // max(1, prod(self.source_shape(shapes)))

    def compute(self, read: Elements, picks: Picks) -> Array:
        try:
            return self._computed(read, picks)
        except Error as error:
            prefix = f"cannot quantize {self.source}: "
            if error.message.startswith(prefix):  # the tensor_scale was computed for other parts
                raise
            raise Error(f"{prefix}{error.message}") from None

    def _computed(self, read: Elements, picks: Picks) -> Array:
        shape = read.shape(self.source)
        sizes = block_sizes(shape, self.block)
        if self.part == "codes":
            return self._codes(read, sizes, picks)
        if self.part == "tensor_scale":
            grid = [size // part for size, part in zip(shape, sizes, strict=True)]
            parts = self._parts(read, sizes, tuple(map(range, grid)))
            return find_tensor_scale(parts, self.kind, len(shape))
        dense = tuple(range(pick[0], pick[-1] + 1) for pick in picks)
        values = self._scales(read, sizes, dense)[self.part == "zeros"]
        return values[tuple(slice(None, None, pick.step) for pick in picks)]

    def _codes(self, read: Elements, sizes: Sizes, picks: Picks) -> Array:
        """The codes at `picks`; of the complete blocks around them where these are cut unevenly."""
        blocks = tuple(map(_blocks_of, picks, sizes))
        cover = tuple(map(_covered, blocks, sizes))
        region = picks if all(map(_fits, picks, sizes)) else cover
        values = read.elements(self.source, region)
        if self.method == "absmax" and values.size == prod(map(len, cover)):
            every = tuple(slice(0, len(block)) for block in blocks)
            scales = self._found(read, lambda: [(every, values)], blocks)
        else:
            scales = self._scales(read, sizes, blocks)
        codes = codes_of(values, self.kind, *scales, tensor_scale=self._tensor_scale(read))
        if region is picks:
            return codes
        return codes[tuple(map(_places, picks, cover))]

    def _scales(self, read: Elements, sizes: Sizes, blocks: Picks) -> Arrays:
        """(scales,) or (scales, zeros) of some blocks, found once for all parts."""
        key = "scales and zeros", replace(self, part="codes", steps=()), blocks
        return read.once(key, lambda: self._found(read, self._parts(read, sizes, blocks), blocks))

    def _found(self, read: Elements, parts: Parts, blocks: Picks) -> Arrays:
        kind = self.scale_dtype or read.dtype(self.source)
        grid, tensor_scale = tuple(map(len, blocks)), self._tensor_scale(read)
        scales, zeros = find_scales(parts, grid, self.kind, kind, self.method, tensor_scale)
        return (scales,) if zeros is None else (scales, zeros)

    def _tensor_scale(self, read: Elements) -> Array | None:
        if not self.kind.tensor_scale:
            return None
        one = (range(1),) * len(self.block)
        return read.elements(replace(self, part="tensor_scale", steps=()), one)

    def _parts(self, read: Elements, sizes: Sizes, blocks: Picks) -> Parts:
        """The values of adjacent blocks, a part at a time."""
        cover = tuple(map(_covered, blocks, sizes))

        def parts() -> Iterator[tuple[Place, Array]]:
            for place, index in tiles(tuple(map(len, cover)), sizes, AT_ONCE):
                picks = tuple(pick[part] for pick, part in zip(cover, place, strict=True))
                yield index, read.elements(self.source, picks)

        return parts


def _blocks_of(picks: range, size: int) -> range:
    """The blocks that hold the elements at `picks`."""
    return picks if size == 1 else range(picks[0] // size, picks[-1] // size + 1)


def _covered(blocks: range, size: int) -> range:
    """The elements of some blocks."""
    return blocks if size == 1 else range(blocks.start * size, blocks.stop * size)


def _places(picks: range, cover: range) -> slice:
    """The places of picks in what covers them, which has the same step or 1."""
    return slice(cover.index(picks[0]), cover.index(picks[-1]) + 1, picks.step // cover.step)


def _fits(picks: range, size: int) -> bool:
    """Whether picks are complete blocks, or inside of one, so that scales spread evenly."""
    first, end = picks[0], picks[-1] + 1
    inside = size == 1 or first // size == picks[-1] // size
    return inside or (len(picks) == end - first and not first % size and not end % size)


# -- layouts of other libraries


@dataclass(frozen=True)
class UnpackedRef(ComputedRef, keyword="unpacked"):
    """`unpacked(@ckpt["l.qweight"], "awq", u4[64, 128])`: elements of i32 words, in a type.

    The packing is a row of irc/quantization/packing.py. Codes of i4 and i8 are plus 8 and 128.
    """

    source: Ref
    packing: str
    dtype: TypeDtype
    shape: TypeShape

    def __post_init__(self) -> None:
        super().__post_init__()
        words_shape(self.packing, self.dtype, self.shape)

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        wanted = words_shape(self.packing, self.dtype, self.shape)
        if shapes[0] != wanted:
            raise Error(f"{self} needs words {[*wanted]}, but {self.source} has {[*shapes[0]]}")
        return self.shape

    def source_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        return self.dtype

    def compute(self, read: Elements, picks: Picks) -> Array:
        row = packing(self.packing)
        words = row.words(picks[row.dim], self.dtype)
        packed = read.elements(self.source, (*picks[: row.dim], words, *picks[row.dim + 1 :]))
        return unpack(np.ascontiguousarray(packed), words[0], picks[row.dim], row, self.dtype)


@dataclass(frozen=True)
class RepeatedRef(ComputedRef, keyword="repeated"):
    """`repeated(@ckpt["l.scale"], [2, 1], [9, 56])`: every element several times in a row.

    The shape may cut off the last of them: element i is element i // count of the source.
    """

    source: Ref
    counts: Sizes
    shape: Sizes

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        pairs = zip(self.shape, self.counts, strict=False)
        wanted = tuple(-(-size // max(1, count)) for size, count in pairs)
        if wanted != shapes[0] or len(self.shape) != len(self.counts) or 0 in self.counts:
            raise Error(f"{self} does not fit {self.source}, which has {[*shapes[0]]}")
        return self.shape

    def compute(self, read: Elements, picks: Picks) -> Array:
        index = [np.array(pick) // count for pick, count in zip(picks, self.counts, strict=True)]
        region = tuple(range(places[0], places[-1] + 1) for places in index)
        return read.elements(self.source, region)[np.ix_(*(places - places[0] for places in index))]


@dataclass(frozen=True)
class ReciprocalRef(ComputedRef, keyword="reciprocal"):
    """`reciprocal(@ckpt["l.weight_global_scale"])`: 1 / each element, of its dtype."""

    source: Ref

    def compute(self, read: Elements, picks: Picks) -> Array:
        values = read.elements(self.source, picks)
        with np.errstate(divide="ignore", over="ignore"):
            return (1 / as_f32(values)).astype(values.dtype, copy=False)


@dataclass(frozen=True)
class SortingRef(ComputedRef, keyword="sorting"):
    """`sorting(@ckpt["l.g_idx"])`: the indices that sort a vector, equal elements in order; i32."""

    source: Ref

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        if len(shapes[0]) != 1:
            raise Error(f"{self} has {[*shapes[0]]}; expected a vector")
        return shapes[0]

    def source_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        return "i32"

    def compute(self, read: Elements, picks: Picks) -> Array:
        (size,) = read.shape(self.source)
        values = read.elements(self.source, (range(size),))
        return np.argsort(values, kind="stable").astype(np.int32)[np.array(picks[0])]


@dataclass(frozen=True)
class StridedRef(ComputedRef, keyword="strided"):
    """`strided(@ckpt["gate_up"]; 1, 0, 64, 2)`: of a dimension, every second slice from 0 to 63."""

    source: Ref
    dim: Along
    start: int
    stop: int
    step: int

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        (shape,) = shapes
        size = shape[self.dim] if 0 <= self.dim < len(shape) else 0
        if not 0 <= self.start < self.stop <= size or self.step < 1:
            raise Error(f"{self} takes slices of {[*shape]}, which it does not have")
        return (*shape[: self.dim], len(self._all), *shape[self.dim + 1 :])

    @property
    def _all(self) -> range:
        return range(self.start, self.stop, self.step)

    def compute(self, read: Elements, picks: Picks) -> Array:
        index = [self._all[i] for i in (picks[self.dim][0], picks[self.dim][-1])]
        region = range(index[0], index[1] + 1)
        values = read.elements(self.source, (*picks[: self.dim], region, *picks[self.dim + 1 :]))
        wanted = [self._all[i] - index[0] for i in picks[self.dim]]
        return np.take(values, wanted, self.dim)


@dataclass(frozen=True)
class TakenRef(ComputedRef, keyword="taken"):
    """`taken(@ckpt["w"], sorting(@ckpt["g_idx"]); 0)`: slices of a dimension at some indices."""

    source: Ref
    indices: Ref
    dim: Along

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        shape, indices = shapes
        if not 0 <= self.dim < len(shape) or len(indices) != 1:
            raise Error(f"{self} takes {[*indices]} of {[*shape]}; expected a vector of indices")
        return (*shape[: self.dim], *indices, *shape[self.dim + 1 :])

    def input_ndims(self, ndim: int) -> Sequence[int]:
        return ndim, 1

    def compute(self, read: Elements, picks: Picks) -> Array:
        index = read.elements(self.indices, (picks[self.dim],))
        first, last = int(index.min()), int(index.max())
        size = read.shape(self.source)[self.dim]
        if not 0 <= first <= last < size:
            raise Error(f"{self} has the indices {first} to {last}; expected 0 to {size - 1}")
        region = range(first, last + 1)
        values = read.elements(self.source, (*picks[: self.dim], region, *picks[self.dim + 1 :]))
        return np.take(values, index - first, self.dim)
