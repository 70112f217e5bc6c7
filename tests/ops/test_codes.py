"""Codes of 4 and 8 bits, each of them, against the definitions of their formats.

The definitions are written out here, in Python's own numbers: OCP 8-bit floating point (OFP8) and
OCP Microscaling (MX) for the floats, two's complement for the integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from irc.ir.dtypes import DTYPES, numpy_dtype
from tests.fresh import fresh
from tests.ops.compare import apply

# Bits of exponent and mantissa; the bias is half the range of the exponent, as in IEEE 754.
FLOATS = {"f8e4m3": (4, 3), "f8e5m2": (5, 2), "f4e2m1": (2, 1)}
INTEGERS = ("i4", "u4", "i8", "u8")
LARGEST = {"i4": 7, "i8": 127, "f8e4m3": 448, "f8e5m2": 57344, "f4e2m1": 6}


def number(name: str, code: int) -> float:
    """The number that the bits of a code stand for."""
    if name == "f8e8m0":
        return math.nan if code == 255 else math.ldexp(1, code - 127)
    bits = DTYPES[name].bits
    if name in INTEGERS:
        return code - (1 << bits) * (name[0] == "i" and code >> (bits - 1))
    exponent_bits, mantissa_bits = FLOATS[name]
    sign = -1 if code >> (bits - 1) else 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if name == "f8e4m3" and (exponent, mantissa) == (15, 7):
        return math.nan
    if name == "f8e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits)


def every_code(name: str) -> tuple[np.ndarray, list[float]]:
    """(all codes of a format, the number of each)."""
    codes = np.arange(1 << DTYPES[name].bits)
    array = codes.astype(np.uint8).view(np.int8 if name[0] == "i" else np.uint8)
    if name in FLOATS or name == "f8e8m0":
        array = array.view(numpy_dtype(name))
    numbers = [number(name, code) for code in codes.tolist()]
    return np.asarray(numbers).astype(numpy_dtype(name)) if name in INTEGERS else array, numbers


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    """f32 rounded to the upper half of its bits, halves to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


@np.errstate(over="ignore")
def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """f32 numbers rounded to a float of numpy, or to bf16."""
    return bf16(values) if kind == "bf16" else values.astype(kind.replace("f", "float"))


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("scales", ["f32", "bf16", "f8e8m0", "f8e4m3"])
def test_dequantize_of_every_code(name: str, kind: str, scales: str) -> None:
    """The product of f32 numbers, rounded once to f32 and once to the result."""
    codes, numbers = every_code(name)
    rng = fresh(len(numbers))
    if scales in ("f32", "bf16"):
        scale = rng.uniform(0.01, 1, (3, 1)).astype(numpy_dtype(scales))
        factors = scale.astype(np.float64)
    else:
        chosen = rng.choice(range(100, 126) if scales == "f8e8m0" else range(1, 120), 3)
        scale = chosen.astype(np.uint8).view(numpy_dtype(scales)).reshape(3, 1)
        factors = np.array([[number(scales, int(code))] for code in chosen])
    x = np.stack([codes] * 3)
    result = apply("dequantize", x, scale, dtype=kind)
    wanted = rounded(f32(np.array([numbers] * 3) * factors), kind)
    finite = np.isfinite(wanted)
    assert result.dtype == numpy_dtype(kind)
    result = result.astype(np.float64)
    np.testing.assert_array_equal(result, wanted.astype(np.float64))
    np.testing.assert_array_equal(np.signbit(result[finite]), np.signbit(wanted[finite]))


@pytest.mark.parametrize("name", INTEGERS)
def test_zero_points(name: str) -> None:
    codes, numbers = every_code(name)
    zeros = fresh(3).choice(codes.astype(np.int32), (3, 1))
    scale = f32([[0.5], [0.25], [3]])
    zero = {"zero": zeros.astype(codes.dtype)}
    result = apply("dequantize", np.stack([codes] * 3), scale, named=zero)
    np.testing.assert_array_equal(result, (np.array([numbers] * 3) - zeros) * scale)
    back = apply("quantize", result, scale, named=zero, dtype=name)
    assert back.dtype == codes.dtype
    np.testing.assert_array_equal(back, np.stack([codes] * 3))


@cache
def known_numbers(name: str) -> dict[float, int]:
    """The codes by their finite numbers, of floats those of the sign +."""
    return {
        each: code
        for code, each in enumerate(every_code(name)[1])
        if math.isfinite(each) and (name in INTEGERS or math.copysign(1, each) > 0)
    }


def nearest(name: str, value: float) -> float:
    """The number of the code next to a value: of two at one distance that of the even code."""
    known = known_numbers(name)
    size = value if name in INTEGERS else abs(value)
    exact = Fraction(min(max(size, min(known)), max(known)))
    best = min(known, key=lambda each: (abs(Fraction(each) - exact), known[each] % 2))
    return best if name in INTEGERS else math.copysign(best, value)


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
def test_quantize_to_every_code(name: str) -> None:
    """Every code, what lies halfway between two, a little beside that, and beyond all codes."""
    finite = sorted(each for each in every_code(name)[1] if math.isfinite(each))
    middles = f32([(a + b) / 2 for a, b in pairwise(finite)])
    beside = [np.nextafter(middles, f32(to)) for to in (-np.inf, np.inf)]
    beyond = f32([finite[0] * 3 - 1, finite[-1] * 3, finite[-1] + 0.6, -np.inf, np.inf])
    x = np.concatenate([f32(finite), middles, *beside, beyond])
    for scale in (1.0, 0.125):
        result = apply("quantize", x * f32(scale), f32([scale]), dtype=name)
        wanted = np.array([nearest(name, clipped(each, finite)) for each in x.tolist()])
        assert result.dtype == numpy_dtype(name)
        result = result.astype(np.float64)
        np.testing.assert_array_equal(result, wanted)
        if name in FLOATS:
            np.testing.assert_array_equal(np.signbit(result), np.signbit(wanted))


def clipped(value: float, finite: Sequence[float]) -> float:
    return min(max(value, finite[0]), finite[-1])


@pytest.mark.parametrize("name", ["i8", "f8e4m3", "f4e2m1"])
def test_quantize_divides_in_f32(name: str) -> None:
    rng = fresh(11)
    for kind in ("f32", "f16", "bf16"):
        x = (rng.standard_normal((2, 8, 12)) * 30).astype(numpy_dtype(kind))
        scale = rng.uniform(0.1, 9, (2, 1, 3)).astype(np.float32)
        result = apply("quantize", x, scale, dtype=name)
        quotients = x.astype(np.float32) / np.repeat(scale, 4, 2)
        finite = [-128, 127] if name == "i8" else [-LARGEST[name], LARGEST[name]]
        wanted = [nearest(name, clipped(each, finite)) for each in quotients.ravel().tolist()]
        np.testing.assert_array_equal(result.astype(np.float64).ravel(), wanted)


@pytest.mark.parametrize("name", LARGEST)
def test_powers_of_two_as_scales(name: str) -> None:
    """OCP MX: the exponent of the largest number less that of the largest code."""
    less = math.frexp(LARGEST[name])[1] - 1
    powers = np.ldexp(f32(1), np.arange(-110, 120))
    below = np.nextafter(powers, f32(0))
    most = np.concatenate([powers, below, powers * f32(1.5)])
    x = np.stack([most, -most / 2, most * 0, -most], 1).reshape(1, -1)
    result = apply("dynamic_scale", x, dtype=name, block=4, scale="f8e8m0")[0]
    wanted = [max(math.frexp(each)[1] - 1 - less, -127) for each in most.tolist()]
    assert result.view(np.uint8).tolist() == [each + 127 for each in wanted]


@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("block", [0, 6])
def test_scales_map_the_largest_to_the_largest(name: str, kind: str, block: int) -> None:
    x = fresh(8).standard_normal((3, 24)).astype(numpy_dtype(kind))
    x[1] = 0
    result = apply("dynamic_scale", x, dtype=name, block=block, scale=kind).astype(np.float64)
    most = np.abs(x.astype(np.float32)).reshape(3, -1, block or 24).max(-1)
    wanted = rounded(most / f32(LARGEST[name]), kind).astype(np.float64)
    wanted[1] = 1
    np.testing.assert_array_equal(result, wanted)


def test_scales_of_two_levels() -> None:
    """NVFP4: a block's scale is an f8e4m3 times that of the tensor; 1 where it would be 0."""
    x = fresh(9).standard_normal((4, 32)).astype(np.float32)
    x[:, :16] *= f32([[1e-9], [1e-3], [1], [1e9]])
    tensor = f32([[np.abs(x[2]).max() / (448 * 6)]])
    codes: Any = {"dtype": "f4e2m1", "block": 16, "scale": "f8e4m3"}
    result = apply("dynamic_scale", x, named={"tensor_scale": tensor}, **codes)
    most = np.abs(x).reshape(4, 2, 16).max(-1)
    quotients = (most / f32(6) / tensor[0]).ravel().tolist()
    wanted = [nearest("f8e4m3", clipped(each, [-448, 448])) or 1 for each in quotients]
    assert result.dtype == numpy_dtype("f8e4m3") and wanted[0] == 1 and wanted[6] == 448
    np.testing.assert_array_equal(result.astype(np.float64).ravel(), wanted)
