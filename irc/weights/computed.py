"""References whose elements are computed from those of others, a region at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.dtypes import dtype as dtype_called
from ..ir.string_literals import quote
from ..quantization.formats import (
    Format,
    Parts,
    block_sizes,
    check_method,
    codes_of,
    find_scales,
    find_tensor_scale,
    format_called,
    grid_shape,
)
from ..quantization.rounding import as_f32
from ..quantization.tiles import Place, tiles
from .sources import Ref
from .steps import Shard

Array: TypeAlias = np.ndarray[Any, Any]
Sizes: TypeAlias = tuple[int, ...]
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
        for step in (step for each in self.inputs for step in each.every_step()):
            if isinstance(step, Shard):
                raise Error(f"{self}: {step} belongs behind what is computed, not inside")

    @property
    def inputs(self) -> tuple[Ref, ...]:
        return tuple(getattr(self, name) for name in self._input_names())

    def with_inputs(self, inputs: Sequence[Ref]) -> Ref:
        return replace(self, **dict(zip(self._input_names(), inputs, strict=True)))

    def _input_names(self) -> list[str]:
        """The fields that are references."""
        return [each.name for each in fields(self) if isinstance(getattr(self, each.name), Ref)]

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        """The shape, by those of the inputs; that of the first by default."""
        return shapes[0]

    def result_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        """The dtype, by those of the inputs; None where it depends on an unknown one."""
        return dtypes[0]

    def input_ndims(self, ndim: int) -> Sequence[int]:
        """The number of dimensions of every input, for a result of `ndim`."""
        return [ndim] * len(self.inputs)

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
class ProductRef(ComputedRef):
    """`multiply(@ckpt["w"], @stats["s"]; 1)`: `source` times a vector along a dimension.

    Computed in f32 and rounded to the dtype of the source.
    """

    source: Ref
    factor: Ref
    dim: int

    def source_text(self) -> str:
        return f"multiply({self.source}, {self.factor}; {self.dim})"

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        shape, factor = shapes
        if not 0 <= self.dim < len(shape) or factor != (shape[self.dim],):
            found = f"a factor of {[*factor]} for {[*shape]}"
            raise Error(
                f"{self} has {found}; expected a number per element of dimension {self.dim}"
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
class QuantizedRef(ComputedRef):
    """`quantized(@ckpt["w"], "codes", "int4", [1, 128])`: a part of the quantized source.

    The part is "codes", in the shape of the source, "scales" or "zeros", with an element per block,
    or "tensor_scale". `block` is the size of a block per dimension, 0 for a complete dimension.
    Scales have the dtype `scale_dtype`, that of the source if empty, unless the format fixes one.
    """

    source: Ref
    part: str
    format: str
    block: tuple[int, ...]
    method: str = "absmax"
    scale_dtype: str = ""

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

    def source_text(self) -> str:
        block = f"[{', '.join(map(str, self.block))}]"
        more = f", {quote(self.method)}" if self.method != "absmax" or self.scale_dtype else ""
        more += f", {self.scale_dtype}" if self.scale_dtype else ""
        return f"quantized({self.source}, {quote(self.part)}, {quote(self.format)}, {block}{more})"

    def result_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        grid = grid_shape(shapes[0], self.block)
        if self.part == "codes":
            return shapes[0]
        return (1,) * len(grid) if self.part == "tensor_scale" else grid

    def result_dtype(self, dtypes: Sequence[str | None]) -> str | None:
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
        return prod(shapes[0]) // max(1, prod(self.result_shape(shapes)))

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
        found = self._scales(read, sizes, dense)[self.part == "zeros"]
        return found[tuple(slice(None, None, pick.step) for pick in picks)]

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
