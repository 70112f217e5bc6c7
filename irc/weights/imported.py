"""Computed references for tensors of other libraries, whose layouts differ from those of irc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import Error
from ..ir.string_literals import quote
from ..ir.types import TensorType
from ..quantization.rounding import as_f32
from ..quantization.words import packing, per_word, unpack
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
        packing(self.packing)
        if self.dtype not in ("i4", "u4", "i8", "u8"):
            raise Error(f"words of 32 bits hold i4, u4, i8 or u8, not {self.dtype}")

    @property
    def inputs(self) -> tuple[Ref, ...]:
        return (self.source,)

    def with_inputs(self, inputs: Sequence[Ref]) -> Ref:
        return replace(self, source=inputs[0])

    def source_text(self) -> str:
        type = TensorType(self.dtype, self.shape)
        return f"unpacked({self.source}, {quote(self.packing)}, {type})"

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        wanted, dim = list(self.shape), packing(self.packing).dim
        wanted[dim] = -(-wanted[dim] // per_word(self.dtype))
        if list(shapes[0]) != wanted:
            raise Error(f"{self} needs words {wanted}, but {self.source} has {list(shapes[0])}")
        return self.shape

    def result_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        return self.dtype

    def compute(self, read: Elements, picks: Picks) -> Array:
        packed, count = packing(self.packing), per_word(self.dtype)
        pick = picks[packed.dim]
        words = range(pick[0] // count, pick[-1] // count + 1)
        region = (*picks[: packed.dim], words, *picks[packed.dim + 1 :])
        found = np.ascontiguousarray(read.elements(self.source, region))
        return unpack(found, words[0], pick, packed, self.dtype)


@dataclass(frozen=True)
class RepeatedRef(ComputedRef):
    """`repeated(@ckpt["l.scale"], [2, 1], [9, 56])`: every element several times in a row.

    The shape cuts the last of them off: element i is element i // count of the source.
    """

    source: Ref
    counts: Sizes
    shape: Sizes

    @property
    def inputs(self) -> tuple[Ref, ...]:
        return (self.source,)

    def with_inputs(self, inputs: Sequence[Ref]) -> Ref:
        return replace(self, source=inputs[0])

    def source_text(self) -> str:
        return f"repeated({self.source}, {list(self.counts)}, {list(self.shape)})"

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        fits = len(self.counts) == len(self.shape) == len(shapes[0])
        if not fits or any(
            count < 1 or -(-size // count) != found
            for size, count, found in zip(self.shape, self.counts, shapes[0], strict=True)
        ):
            raise Error(f"{self} does not fit {self.source}, which has {list(shapes[0])}")
        return self.shape

    def result_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        return dtypes[0]

    def compute(self, read: Elements, picks: Picks) -> Array:
        index = [np.array(pick) // count for pick, count in zip(picks, self.counts, strict=True)]
        region = tuple(range(each[0], each[-1] + 1) for each in index)
        return read.elements(self.source, region)[np.ix_(*(each - each[0] for each in index))]


@dataclass(frozen=True)
class ReciprocalRef(ComputedRef):
    """`reciprocal(@ckpt["l.weight_global_scale"])`: 1 / each element, of its dtype."""

    source: Ref

    @property
    def inputs(self) -> tuple[Ref, ...]:
        return (self.source,)

    def with_inputs(self, inputs: Sequence[Ref]) -> Ref:
        return replace(self, source=inputs[0])

    def source_text(self) -> str:
        return f"reciprocal({self.source})"

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        return shapes[0]

    def result_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        return dtypes[0]

    def compute(self, read: Elements, picks: Picks) -> Array:
        values = read.elements(self.source, picks)
        return (1 / as_f32(values)).astype(values.dtype, copy=False)
