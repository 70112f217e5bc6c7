"""Formats of quantized numbers: blocks of codes with a scale each, encoded and decoded by numpy.

`FORMATS` has a row for each. A value is (code - zero) * scale [* tensor_scale].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product as combinations
from math import prod
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from ..errors import Error, did_you_mean
from ..ir.dtypes import numpy_dtype
from .rounding import Array, as_f32, magnitudes, rounded, rounded_codes

METHODS = ("absmax", "mse")
CLIPPED = (1.0, 0.95, 0.91, 0.875, 0.84, 0.8, 0.75, 0.68)  # of the scale by "absmax", for "mse"
POWERS = (1.0, 2.0, 0.5)  # the same for scales that are powers of two
TILE = 1 << 17  # elements; half a megabyte in f32, so that several arrays fit a core's cache
SAME = 1 + 2.0**-17  # errors up to this ratio are equal: sums in another order differ

_facts: Any = ml_dtypes.finfo

Place: TypeAlias = tuple[slice, ...]
# All of a tensor in parts: (region of the grid of blocks, its values). Each call begins anew.
Parts: TypeAlias = Callable[[], Iterable[tuple[Place, Array]]]


@dataclass(frozen=True)
class Format:
    """How codes and scales are stored.

    `scales` is the dtype of the scales, "" for that of the computation. `zeros` is that of the zero
    points, "" where there are none. The largest value of a block has the code `largest`, which for
    formats with zero points is the number of steps between the ends of the block. With
    `tensor_scale` the scales are themselves multiples of one f32 number for the complete tensor.
    """

    name: str
    codes: str
    largest: float
    scales: str = ""
    zeros: str = ""
    tensor_scale: bool = False


_ROWS = (
    Format("int8", "i8", 127),
    Format("int4", "i4", 7),
    Format("uint8", "u8", 255, zeros="u8"),
    Format("uint4", "u4", 15, zeros="u4"),
    Format("fp8", "f8e4m3", 448),
    Format("mxfp8", "f8e4m3", 448, scales="f8e8m0"),  # OCP Microscaling Formats 1.0
    Format("mxfp4", "f4e2m1", 6, scales="f8e8m0"),
    Format("nvfp4", "f4e2m1", 6, scales="f8e4m3", tensor_scale=True),
)
FORMATS = {row.name: row for row in _ROWS}


@dataclass(frozen=True)
class Encoded:
    """Codes in the shape of the values; scales and zeros with an element per block."""

    codes: Array
    scales: Array
    zeros: Array | None = None
    tensor_scale: Array | None = None


def format_called(name: str) -> Format:
    """The format called `name`; an Error names the nearest one."""
    if name not in FORMATS:
        raise Error(f"no format called {name!r}{did_you_mean(name, FORMATS)}")
    return FORMATS[name]


def check_method(name: str) -> None:
    """An Error unless there is a method of this name to find scales."""
    if name not in METHODS:
        raise Error(f"no method called {name!r}{did_you_mean(name, METHODS)}")


def block_sizes(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """The size of a block per dimension, where 0 is the complete dimension."""
    if not shape:
        raise Error("a tensor without dimensions has no blocks to quantize")
    if len(shape) != len(block):
        raise Error(f"the block {[*block]} has not the {len(shape)} dimensions of {[*shape]}")
    sizes = tuple(part or max(size, 1) for size, part in zip(shape, block, strict=True))
    if any(size % part for size, part in zip(shape, sizes, strict=True)):
        raise Error(
            f"blocks of {[*block]} do not divide a tensor of {[*shape]}; "
            "choose divisors, or 0 for a complete dimension"
        )
    return sizes


def grid_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """The number of blocks per dimension: the shape of scales and zeros."""
    sizes = block_sizes(shape, block)
    return tuple(size // part for size, part in zip(shape, sizes, strict=True))


def encode(
    values: Array,
    format: str | Format,
    block: Sequence[int],
    scale_dtype: str = "f32",
    method: str = "absmax",
    tensor_scale: Array | None = None,
) -> Encoded:
    """Quantize an array in blocks of `block`, a size per dimension, where 0 is all of it.

    `method` "absmax" represents the largest value of every block; "mse" takes the scale that, of a
    few smaller ones, has the least square error. Codes are computed with the scale as it is
    rounded to its dtype, which is `scale_dtype` unless the format fixes another.
    """
    kind = format if isinstance(format, Format) else format_called(format)
    check_method(method)
    grid = grid_shape(values.shape, block)
    every = [(tuple(slice(0, size) for size in grid), values)]
    if kind.tensor_scale and tensor_scale is None:
        tensor_scale = find_tensor_scale(lambda: every, kind, len(grid))
    scales, zeros = find_scales(lambda: every, grid, kind, scale_dtype, method, tensor_scale)
    codes = codes_of(values, kind, scales, zeros, tensor_scale)
    return Encoded(codes, scales, zeros, tensor_scale)


def decode(encoded: Encoded) -> Array:
    """The f32 values of codes."""
    values, grid = as_f32(encoded.codes), encoded.scales.shape
    cut = apart(values, grid)
    if encoded.zeros is not None:
        cut = cut - _spread(encoded.zeros)
    return (cut * _spread(_steps(encoded.scales, encoded.tensor_scale))).reshape(values.shape)


def codes_of(
    values: Array,
    format: Format,
    scales: Array,
    zeros: Array | None = None,
    tensor_scale: Array | None = None,
) -> Array:
    """The codes of values in blocks whose scales (and zeros) are known."""
    codes = np.empty(values.shape, np.uint8)
    steps = _steps(scales, tensor_scale)
    for place, index in _tiled(values, scales.shape):
        with np.errstate(over="ignore", under="ignore"):
            scaled = apart(as_f32(values[place]), steps[index].shape) / _spread(steps[index])
        zero = None if zeros is None else _spread(zeros[index])
        codes[place] = rounded_codes(scaled, format.codes, zero).reshape(codes[place].shape)
    return codes.view(numpy_dtype(format.codes))


def find_tensor_scale(parts: Parts, format: Format, ndim: int) -> Array:
    """The f32 number whose product with the largest scale represents the largest value."""
    most = np.zeros((1,) * ndim, np.float32)
    for _, values in parts():
        np.maximum(most, _ends(values, most.shape, False)[1], out=most)
    largest = np.float32(format.largest * float(_facts(numpy_dtype(format.scales)).max))
    scale = most / largest
    return np.where(most > 0, np.maximum(scale, _facts(np.float32).tiny), np.float32(1))


def find_scales(
    parts: Parts,
    grid: Sequence[int],
    format: Format,
    scale_dtype: str,
    method: str = "absmax",
    tensor_scale: Array | None = None,
) -> tuple[Array, Array | None]:
    """(scales, zeros) of every block of the grid, each in its dtype."""
    low, high = np.zeros(grid, np.float32), np.zeros(grid, np.float32)
    for index, values in parts():
        ends = _ends(values, low[index].shape, bool(format.zeros))
        np.minimum(low[index], ends[0], out=low[index])
        np.maximum(high[index], ends[1], out=high[index])
    factors = (1.0,) if method == "absmax" else POWERS if format.scales == "f8e8m0" else CLIPPED
    kind = replace(format, scales=format.scales or scale_dtype)
    tried = [_scales(low, high, factor, kind, tensor_scale) for factor in factors]
    if len(tried) == 1:
        return tried[0]
    errors = _errors(parts, kind, tried, tensor_scale)
    best = np.argmax(errors <= errors.min(axis=0) * SAME, axis=0)[np.newaxis]
    scales = np.stack([scales for scales, _ in tried])
    zeros = [zeros for _, zeros in tried if zeros is not None]
    chosen = np.take_along_axis(np.stack(zeros), best, 0)[0] if zeros else None
    return np.take_along_axis(scales, best, 0)[0], chosen


def _scales(
    low: Array, high: Array, factor: float, format: Format, tensor_scale: Array | None
) -> tuple[Array, Array | None]:
    """Scales and zeros for `factor` of the range of every block; 1 where that is empty.

    Scales of small values are rounded up where they are subnormal, and never to 0.
    """
    low, high = low * np.float32(factor), high * np.float32(factor)
    width, kind = high - low, numpy_dtype(format.scales)
    steps = width / np.float32(format.largest)
    if format.scales == "f8e8m0":  # 2^(floor(log2 width) - floor(log2 largest))
        exponents = np.frexp(width)[1] - np.frexp(np.float32(format.largest))[1]
        steps = np.ldexp(np.float32(1), np.clip(exponents, -127, 127))
    elif tensor_scale is not None:  # which exceeds the range by rounding only
        facts = _facts(kind)
        steps = np.clip(steps / tensor_scale, facts.smallest_subnormal, facts.max)
    else:
        facts = _facts(kind)
        small, least = steps < np.float32(facts.tiny), np.float32(facts.smallest_subnormal)
        steps[small] = np.ceil(steps[small] / least) * least
    with np.errstate(over="ignore", under="ignore"):
        scales = steps.astype(kind)
    wide = as_f32(scales)
    if not np.isfinite(wide).all():
        raise Error(f"values up to {width.max()} need larger scales than {format.scales} has")
    scales[width == 0] = 1
    if not format.zeros:
        return scales, None
    zeros = np.clip(np.rint(-low / as_f32(scales)), 0, format.largest)
    return scales, zeros.astype(numpy_dtype(format.zeros))


def _ends(values: Array, grid: Sequence[int], signed: bool) -> tuple[Array, Array]:
    """The ends of the range of every block, which has 0; unsigned: 0 and the largest |x|."""
    low, high = np.zeros(grid, np.float32), np.zeros(grid, np.float32)
    for place, index in _tiled(values, grid):
        cut, shape = values[place], high[index].shape
        if signed:
            wide = as_f32(cut)
            np.minimum(low[index], _reduced(np.minimum, wide, shape), out=low[index])
            most = _reduced(np.maximum, wide, shape)
        else:
            most = magnitudes(cut, partial(_reduced, np.maximum, grid=shape))
        np.maximum(high[index], most, out=high[index])
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise Error("the values have NaN or infinities, which no scale represents")
    return low, high


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def _errors(
    parts: Parts,
    format: Format,
    tried: Sequence[tuple[Array, Array | None]],
    tensor_scale: Array | None,
) -> Array:
    """The sums of the squared errors of every block: [number of scales that are tried, *grid]."""
    steps = np.stack([_steps(scales, tensor_scale) for scales, _ in tried])
    sums = np.zeros(steps.shape)
    for index, values in parts():
        for place, at in _tiled(values, steps[0][index].shape):
            wide = as_f32(values[place])
            for number, (_, zeros) in enumerate(tried):
                step = steps[number][index][at]
                quotients = apart(wide, step.shape) / _spread(step)
                zero = None if zeros is None else _spread(zeros[index][at])
                quotients -= rounded(quotients, format.codes, zero)
                sums[number][index][at] += _squares(quotients) * step.astype(np.float64) ** 2
    return sums


def _squares(cut: Array) -> Array:
    """The sums of the squares of every block of values that are `apart`."""
    sums = np.einsum("...i,...i->...", cut, cut)
    for axis in reversed(range(1, sums.ndim, 2)):
        sums = np.add.reduce(sums, axis=axis)
    return sums


def _reduced(function: np.ufunc, values: Array, grid: Sequence[int]) -> Array:
    """A reduction over every block, one dimension after the other."""
    cut = apart(values, grid)
    for axis in reversed(range(1, cut.ndim, 2)):
        cut = function.reduce(cut, axis=axis)
    return cut


def _tiled(values: Array, grid: Sequence[int]) -> Iterator[tuple[Place, Place]]:
    """(a region that fits the cache, its blocks in the grid)."""
    sizes = [size // max(1, count) or 1 for size, count in zip(values.shape, grid, strict=True)]
    return tiles(values.shape, sizes, TILE) if values.size else iter(())


def _steps(scales: Array, tensor_scale: Array | None) -> Array:
    """The f32 number that a code of each block is multiplied by."""
    wide = as_f32(scales)
    return wide if tensor_scale is None else wide * as_f32(tensor_scale)


def _spread(blocks: Array) -> Array:
    """A number per block as f32, so shaped that each meets its block of `apart` values."""
    return apart(as_f32(blocks), blocks.shape)


# -- tiles of a tensor in blocks: regions that fit the cache, of whole blocks or inside of one


def tiles(shape: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[tuple[Place, Place]]:
    """(a region of a tensor, its region of the grid of blocks), of about `limit` elements.

    `sizes` is the size of a block per dimension. The regions cover the tensor in row-major order.
    """
    if not shape:
        yield (), ()
        return
    cut = next((i for i in range(len(shape)) if prod(shape[i + 1 :]) <= limit), len(shape) - 1)
    step = max(1, limit // max(1, prod(shape[cut + 1 :])))
    inner = [(0, size) for size in shape[cut + 1 :]]
    for outer in combinations(*map(range, shape[:cut])):
        for here in _ranges(shape[cut], sizes[cut], step):
            ranges = [*((i, i + 1) for i in outer), here, *inner]
            yield (
                tuple(slice(*part) for part in ranges),
                tuple(_blocks(*part, size) for part, size in zip(ranges, sizes, strict=True)),
            )


def apart(values: Array, grid: Sequence[int]) -> Array:
    """Every dimension as two, [blocks, size of a block]: a tensor of a grid of as many blocks."""
    shape: list[int] = []
    for size, count in zip(values.shape, grid, strict=True):
        shape += [count, size // max(1, count)]
    return values.reshape(shape)


def _ranges(size: int, block: int, step: int) -> Iterator[tuple[int, int]]:
    """Ranges of about `step` indices: whole blocks, or parts of one block."""
    if step >= block:
        step = step // block * block
        block = size
    for first in range(0, size, block or 1):
        last = min(first + block, size)
        for begin in range(first, last, step):
            yield begin, min(begin + step, last)


def _blocks(begin: int, end: int, size: int) -> slice:
    return slice(begin // size, -(-end // size))
