"""Rounding of f32 numbers to the narrow numbers of a dtype, to nearest even and saturated.

The results are those of a conversion by ml_dtypes after clipping. Integer arithmetic on the bits
takes a tenth of its time, and threads run it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..ir.dtypes import dtype, numpy_dtype, widened

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Float:
    """A narrow float: bits of its fraction, its least exponent, its largest number."""

    fraction: int
    least: int
    largest: float


_FLOATS = {"f8e4m3": _Float(3, -6, 448.0), "f8e5m2": _Float(2, -14, 57344.0)} | {
    "f4e2m1": _Float(1, 0, 6.0)
}
_MASKS = {numpy_dtype(n): np.uint16(0x7FFF) for n in ("bf16", "f16")} | {
    numpy_dtype("f32"): np.uint32(0x7FFFFFFF)
}
_RANGES = {"i4": (-8, 7), "u4": (0, 15), "i8": (-128, 127), "u8": (0, 255)}


def as_f32(values: Array) -> Array:
    """Values as f32, bf16 by a shift of its bits."""
    if values.dtype == numpy_dtype("bf16") and values.shape:
        bits = values.view(np.uint16)
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    return widened(values).astype(np.float32, copy=False)


def magnitudes(values: Array, reduce: Callable[[Array], Array]) -> Array:
    """A maximum of |x| as f32, where `reduce` takes maxima; NaN and infinities exceed all others.

    Without their sign, the bits of floats are in the order of their values.
    """
    if values.dtype not in _MASKS:
        values = as_f32(values)
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    return as_f32(reduce(bits & _MASKS[values.dtype]).view(values.dtype))


def rounded(values: Array, name: str, zero: Array | None = None) -> Array:
    """Codes of f32 numbers as f32, less the zero point: what a code of the dtype stands for."""
    if name in _FLOATS:
        return _rounded_float(values, _FLOATS[name])
    low, high = _RANGES[name]
    codes = np.rint(values)
    if zero is None:
        return np.clip(codes, low, high, out=codes)
    codes += zero
    np.clip(codes, low, high, out=codes)
    codes -= zero
    return codes


def rounded_codes(values: Array, name: str, zero: Array | None = None) -> Array:
    """The bytes of the codes of f32 numbers, one byte per code also where it has four bits."""
    codes = rounded(values, name, zero)
    if name in _FLOATS:
        return _float_codes(codes, values, name)
    if zero is not None:
        codes += zero
    return codes.astype(np.int8 if dtype(name).kind == "int" else np.uint8).view(np.uint8)


def _rounded_float(values: Array, kind: _Float) -> Array:
    """To a multiple of the last place of each number's binade, by adding a large power of two."""
    rounded = np.clip(values, -kind.largest, kind.largest)
    bits = rounded.view(np.uint32) & 0x7F800000
    np.maximum(bits, np.uint32((kind.least + 127) << 23), out=bits)
    bits += np.uint32((23 - kind.fraction) << 23)
    bits |= 0x00400000
    large = bits.view(np.float32)  # 1.5 * 2^n keeps the sign of the sum
    rounded += large
    rounded -= large
    return rounded


def _float_codes(rounded: Array, values: Array, name: str) -> Array:
    """The bits of rounded numbers; a number rounded to zero keeps its sign."""
    signs, kind = values.view(np.uint32) >> 24, _FLOATS[name]
    if name == "f4e2m1":
        bits = (rounded.view(np.uint32) & 0x7FFFFFFF) >> 22  # 252 is 0.5, 254 is 1
        codes = (np.maximum(bits, 251) - 251).astype(np.uint8)
        codes -= codes > 1
        return codes | (signs & 0x80).astype(np.uint8) >> 4
    # Scaled so that the exponent, and with it numbers below the least one, are those of f32.
    bits = (rounded * np.float32(2.0 ** (-126 - kind.least))).view(np.uint32)
    bits >>= 23 - kind.fraction
    bits &= 0x7F
    bits |= signs & 0x80
    return bits.astype(np.uint8)
