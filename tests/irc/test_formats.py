"""Formats of quantized numbers against their definitions, written out block by block."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irc.errors import Error
from irc.ir.dtypes import numpy_dtype
from irc.quantization import formats
from irc.quantization.formats import FORMATS, Encoded, decode, encode, find_scales
from irc.quantization.rounding import rounded_codes
from tests.fresh import fresh
from tests.ops.test_codes import FLOATS, every_code, nearest

BLOCKS = ([1, 4], [1, 0], [0, 0], [2, 3], [3, 1], [0, 1], [1, 1])
SHAPE = (6, 12)
LARGEST = {"int8": 127, "int4": 7, "uint8": 255, "uint4": 15, "fp8": 448, "mxfp8": 448} | {
    "mxfp4": 6,
    "nvfp4": 6,
}


def f32(value: Any) -> Any:
    return np.float32(value)


def blocks_of(shape: tuple[int, ...], block: list[int]) -> list[tuple[slice, ...]]:
    """The regions of the blocks of a tensor, in order."""
    sizes = [part or size for part, size in zip(block, shape, strict=True)]
    starts = [range(0, size, part) for size, part in zip(shape, sizes, strict=True)]
    return [
        tuple(slice(at, at + part) for at, part in zip(each, sizes, strict=True))
        for each in product(*starts)
    ]


def defined(values: np.ndarray, name: str, block: list[int], kind: str) -> Encoded:
    """What "absmax" gives, one block after the other in Python's numbers."""
    format, wide = FORMATS[name], values.astype(np.float32)
    stored = numpy_dtype(format.scales or kind)
    tensor = f32(np.abs(wide).max() / f32(448 * 6)) if format.tensor_scale else f32(1)
    codes, scales, zeros = np.zeros_like(wide), [], []
    for place in blocks_of(values.shape, block):
        part = wide[place]
        low, high = (part.min(initial=0), part.max(initial=0)) if format.zeros else (0, 0)
        width = f32(high - low) if format.zeros else np.abs(part).max()
        scale = f32(width / f32(LARGEST[name]))
        if format.scales == "f8e8m0" and width:
            power = math.floor(math.log2(width)) - math.floor(math.log2(LARGEST[name]))
            scale = f32(2.0**power)
        least = float(ml_dtypes.finfo(stored).smallest_subnormal)
        if format.tensor_scale:
            scale = f32(max(scale / tensor, least))
        elif scale < ml_dtypes.finfo(stored).smallest_normal:
            scale = f32(math.ceil(scale / least) * least)
        scale = (scale if width else f32(1)).astype(stored)
        scales.append(scale)
        step = f32(scale) * tensor
        quotients = (part / f32(step)).ravel().tolist()
        zero = nearest("u8", min(round(-low / f32(scale)), LARGEST[name])) if format.zeros else 0
        zeros.append(zero)
        rounded = [
            nearest(format.codes, each if format.codes in FLOATS else round(each) + zero)
            for each in quotients
        ]
        codes[place] = np.reshape(rounded, part.shape)
    grid = tuple(size // (part or size) for size, part in zip(values.shape, block, strict=True))
    found = Encoded(codes.astype(numpy_dtype(format.codes)), np.array(scales, stored).reshape(grid))
    if format.zeros:
        shaped = np.reshape(zeros, grid).astype(numpy_dtype(format.zeros))
        return Encoded(found.codes, found.scales, shaped)
    ones = (1,) * values.ndim
    return Encoded(
        found.codes, found.scales, None, np.full(ones, tensor) if format.tensor_scale else None
    )


def spread(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for dim, size in enumerate(shape):
        blocks = np.repeat(blocks, size // blocks.shape[dim], axis=dim)
    return blocks.astype(np.float32)


def drawn(kind: str) -> np.ndarray:
    """Numbers of many sizes, some of them 0, and a block of nothing but 0."""
    rng = fresh()
    values = rng.standard_normal(SHAPE) * 2.0 ** rng.integers(-6, 6, SHAPE)
    values[rng.random(SHAPE) < 0.1] = 0
    values[:3, :6] = 0
    return values.astype(numpy_dtype(kind))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, block: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, tile in (("f32", 1), ("f16", 7), ("bf16", 1 << 17)):
        monkeypatch.setattr(formats, "TILE", tile)
        values = drawn(kind)
        found, wanted = encode(values, name, block, kind), defined(values, name, block, kind)
        for part in ("scales", "zeros", "tensor_scale", "codes"):
            got, want = getattr(found, part), getattr(wanted, part)
            assert (got is None) == (want is None)
            if got is not None:
                assert got.dtype == want.dtype, part
                np.testing.assert_array_equal(got.astype("f4"), want.astype("f4"), part)
        steps = spread(found.scales, SHAPE)
        if found.tensor_scale is not None:
            steps = steps * found.tensor_scale
        less = 0 if found.zeros is None else spread(found.zeros, SHAPE)
        wanted_values = (found.codes.astype(np.float32) - less) * steps
        np.testing.assert_array_equal(decode(found), wanted_values)


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_and_what_lies_between(name: str) -> None:
    codes, numbers = every_code(name)
    finite = np.array([each for each in numbers if math.isfinite(each)], np.float32)
    finite.sort()
    middles = (finite[1:] + finite[:-1]) / 2
    beside = [np.nextafter(middles, f32(to)) for to in (-np.inf, np.inf)]
    random = fresh().standard_normal(1000) * 2.0 ** fresh(1).integers(-140, 127, 1000)
    tiny = f32([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38])
    x = np.concatenate([finite, middles, *beside, random.astype(np.float32), tiny])
    found = rounded_codes(x, name).view(codes.dtype).astype(np.float64)
    wanted = [nearest(name, each) for each in x.tolist()]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(x))


@pytest.mark.parametrize("name", FORMATS)
def test_mean_square_error_is_not_above_that_of_the_largest_value(name: str) -> None:
    values = fresh().standard_normal((16, 64)).astype(np.float32)
    for block in ([1, 16], [0, 0]):
        sums: list[np.ndarray] = []
        for method in ("absmax", "mse"):
            error = (decode(encode(values, name, block, method=method)) - values).astype("f8") ** 2
            sums.append(np.array([error[place].sum() for place in blocks_of((16, 64), block)]))
        assert (sums[1] <= sums[0] * (1 + 1e-5)).all()
        if FORMATS[name].codes in ("i4", "u4") and block[0]:
            assert sums[1].sum() < sums[0].sum()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("apart", [False, True])
def test_equal_errors_choose_the_largest_scale(order: tuple[int, ...], apart: bool) -> None:
    """7/8 of the scale has the code -8 for the largest value, and equal errors of the others."""
    rows = [[-1.2421875, -0.0129394531, -0.0054931641], [0.0158691406, -0.8203125, 0.01953125]]
    values = np.array(rows, np.float32)[:, order]
    column = slice(0, 2), slice(0, 1)
    parts = [(column, values[:, i : i + 1]) for i in range(3)] if apart else [(column, values)]
    scales, _ = find_scales(lambda: parts, (2, 1), FORMATS["int4"], "f32", "mse")
    assert scales.tolist() == encode(values, "int4", [1, 0]).scales.tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_that_are_not_finite(name: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for kind in ("f32", "f16", "bf16"):
            values = drawn(kind)
            values[5, 11] = bad
            with pytest.raises(Error, match="NaN or infinities"):
                encode(values, name, [1, 4])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [3e-5, 1e-5, 4e-6, 1e-7])
def test_small_values_are_kept(name: str, size: float) -> None:
    """Scales of f16 hold all that f16 does; in blocks of f8e4m3 the smallest scale is kept."""
    values = fresh().uniform(-size, size, (2, 8)).astype(np.float16)
    values[:, 0], values[0] = size, values[0] * (1 if FORMATS[name].tensor_scale else 1e4)
    decoded = decode(encode(values, name, [1, 8], "f16"))
    wanted = values.astype(np.float32)
    bits = 0.3 if "4" in FORMATS[name].codes[:2] else 0.13  # of four bits, and of eight
    error = np.abs(decoded - wanted).max(axis=1) / np.abs(wanted).max(axis=1)
    assert (error <= bits).all() and decode(encode(values * 0, name, [1, 8], "f16")).max() == 0


def test_the_smallest_numbers_in_nvfp4() -> None:
    for size in (1e-45, 3e-41, 1e-38):
        values = (size * np.linspace(-1, 1, 32, dtype=np.float64)).astype(np.float32)[None]
        decoded = decode(encode(values, "nvfp4", [1, 16]))
        assert np.abs(decoded - values).max() <= max(0.3 * size, 6e-42)


def test_bad_arguments() -> None:
    values = np.ones((4, 6), np.float32)
    for block, message in (
        ([1, 4], r"blocks of \[1, 4\] do not divide a tensor of \[4, 6\]"),
        ([4], r"the block \[4\] has not the 2 dimensions"),
    ):
        with pytest.raises(Error, match=message):
            encode(values, "int4", block)
    with pytest.raises(Error, match="without dimensions"):
        encode(values[0, 0], "int4", [])
    with pytest.raises(Error, match="no format called 'int5'; did you mean"):
        encode(values, "int5", [1, 0])
    with pytest.raises(Error, match="no method called 'rms'"):
        encode(values, "int4", [1, 0], method="rms")
    with pytest.raises(Error, match="need larger scales than f16 has"):
        encode(values * 1e9, "int4", [1, 0], "f16")
