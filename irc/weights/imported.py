"""Computed references for tensors of other libraries, whose layouts differ from those of irc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import Error
from ..ir.string_literals import quote
from ..ir.types import TensorType
from ..quantization.rounding import as_f32
from ..quantization.words import packing, unpack, words_shape
from .computed import Array, ComputedRef, Elements, Picks, Sizes
from .sources import Ref


@dataclass(frozen=True)
class UnpackedRef(ComputedRef):
    """`unpacked(@ckpt["l.qweight"], "awq", u4[64, 128])`: elements of i32 words, in a type.

    The packing is a row of `irc.quantization.words`. Codes of i4 and i8 are stored plus 8 and 128.
    """

    source: Ref
    packing: str
    dtype: str
    shape: Sizes

    def __post_init__(self) -> None:
        super().__post_init__()
        words_shape(self.packing, self.dtype, self.shape)

    def source_text(self) -> str:
        type = TensorType(self.dtype, self.shape)
        return f"unpacked({self.source}, {quote(self.packing)}, {type})"

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        wanted = words_shape(self.packing, self.dtype, self.shape)
        if shapes[0] != wanted:
            raise Error(f"{self} needs words {[*wanted]}, but {self.source} has {[*shapes[0]]}")
        return self.shape

    def result_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        return self.dtype

    def compute(self, read: Elements, picks: Picks) -> Array:
        row = packing(self.packing)
        words = row.words(picks[row.dim], self.dtype)
        found = read.elements(self.source, (*picks[: row.dim], words, *picks[row.dim + 1 :]))
        return unpack(np.ascontiguousarray(found), words[0], picks[row.dim], row, self.dtype)


@dataclass(frozen=True)
class RepeatedRef(ComputedRef):
    """`repeated(@ckpt["l.scale"], [2, 1], [9, 56])`: every element several times in a row.

    The shape may cut off the last of them: element i is element i // count of the source.
    """

    source: Ref
    counts: Sizes
    shape: Sizes

    def source_text(self) -> str:
        return f"repeated({self.source}, {[*self.counts]}, {[*self.shape]})"

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        pairs = zip(self.shape, self.counts, strict=False)
        found = tuple(-(-size // max(1, count)) for size, count in pairs)
        if found != shapes[0] or len(self.shape) != len(self.counts) or 0 in self.counts:
            raise Error(f"{self} does not fit {self.source}, which has {[*shapes[0]]}")
        return self.shape

    def compute(self, read: Elements, picks: Picks) -> Array:
        index = [np.array(pick) // count for pick, count in zip(picks, self.counts, strict=True)]
        region = tuple(range(each[0], each[-1] + 1) for each in index)
        return read.elements(self.source, region)[np.ix_(*(each - each[0] for each in index))]


@dataclass(frozen=True)
class ReciprocalRef(ComputedRef):
    """`reciprocal(@ckpt["l.weight_global_scale"])`: 1 / each element, of its dtype."""

    source: Ref

    def source_text(self) -> str:
        return f"reciprocal({self.source})"

    def compute(self, read: Elements, picks: Picks) -> Array:
        values = read.elements(self.source, picks)
        with np.errstate(divide="ignore", over="ignore"):
            return (1 / as_f32(values)).astype(values.dtype, copy=False)


@dataclass(frozen=True)
class SortingRef(ComputedRef):
    """`sorting(@ckpt["l.g_idx"])`: the indices that sort a vector, equal elements in order; i32."""

    source: Ref

    def source_text(self) -> str:
        return f"sorting({self.source})"

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        if len(shapes[0]) != 1:
            raise Error(f"{self} has {[*shapes[0]]}; expected a vector")
        return shapes[0]

    def result_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        return "i32"

    def compute(self, read: Elements, picks: Picks) -> Array:
        (size,) = read.shape(self.source)
        values = read.elements(self.source, (range(size),))
        return np.argsort(values, kind="stable").astype(np.int32)[np.array(picks[0])]


@dataclass(frozen=True)
class TakenRef(ComputedRef):
    """`taken(@ckpt["w"], sorting(@ckpt["g_idx"]); 0)`: slices of a dimension at some indices."""

    source: Ref
    indices: Ref
    dim: int

    def source_text(self) -> str:
        return f"taken({self.source}, {self.indices}; {self.dim})"

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
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
