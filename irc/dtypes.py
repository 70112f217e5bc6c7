"""The element types: their names in text, widths, and numpy counterparts."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .errors import Error, did_you_mean


@dataclass(frozen=True)
class DType:
    """One element type. `bits` is the stored width; sub-byte types occupy a byte in numpy."""

    name: str
    bits: int
    kind: str  # "float", "int", "uint" or "bool"
    numpy: np.dtype[np.generic]

    def nbytes(self, count: int) -> int:
        """The bytes of so many elements in a file; those of four bits lie two to a byte."""
        return -(-count * self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")


def _dtype(name: str, bits: int, kind: str, numpy: object) -> DType:
    return DType(name, bits, kind, np.dtype(numpy))  # type: ignore[call-overload]


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _dtype("f64", 64, "float", np.float64),
        _dtype("f32", 32, "float", np.float32),
        _dtype("f16", 16, "float", np.float16),
        _dtype("bf16", 16, "float", ml_dtypes.bfloat16),
        _dtype("f8e4m3", 8, "float", ml_dtypes.float8_e4m3fn),
        _dtype("f8e5m2", 8, "float", ml_dtypes.float8_e5m2),
        _dtype("i64", 64, "int", np.int64),
        _dtype("i32", 32, "int", np.int32),
        _dtype("i16", 16, "int", np.int16),
        _dtype("i8", 8, "int", np.int8),
        _dtype("i4", 4, "int", ml_dtypes.int4),
        _dtype("u8", 8, "uint", np.uint8),
        _dtype("u4", 4, "uint", ml_dtypes.uint4),
        _dtype("bool", 8, "bool", np.bool_),
    )
}

_BY_NUMPY = {d.numpy: d for d in DTYPES.values()}


def dtype(name: str) -> DType:
    """The element type called `name`; an Error names the nearest one."""
    found = DTYPES.get(name)
    if found is None:
        raise Error(f"no dtype called {name!r}{did_you_mean(name, DTYPES)}")
    return found


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy dtype that holds elements of `name`."""
    return dtype(name).numpy


def dtype_of(array: np.ndarray) -> str:
    """The name of a numpy array's element type."""
    found = _BY_NUMPY.get(array.dtype)
    if found is None:
        raise Error(f"arrays of {array.dtype} have no dtype in irc; use one of {', '.join(DTYPES)}")
    return found.name


def widened(array: np.ndarray) -> np.ndarray:
    """The array as numpy computes with it: narrow floats in f32, i4 and u4 in a byte.

    Integers wrap, so what comes back from the byte to 4 bits is what 4 bits would have given; numpy
    itself has no conversion between i4 and u4, nor their limits.
    """
    wider = _WIDER.get(array.dtype)
    return array if wider is None else array.astype(wider)


def packed(array: np.ndarray) -> np.ndarray:
    """Elements of four bits as bytes, two in each, the first in the low half (ONNX, TensorRT)."""
    halves = array.reshape(-1).view(np.uint8) & 0xF
    if halves.size % 2:
        halves = np.append(halves, np.uint8(0))
    return halves[::2] | halves[1::2] << 4


def unpacked(halves: np.ndarray, name: str) -> np.ndarray:
    """Bytes [..., n] as elements [..., 2 * n] of a dtype of four bits."""
    both = np.stack([halves & 0xF, halves >> 4], axis=-1)
    return both.reshape(*halves.shape[:-1], 2 * halves.shape[-1]).view(numpy_dtype(name))


_WIDER: dict[np.dtype[np.generic], np.dtype[np.generic]] = {
    DTYPES[narrow].numpy: DTYPES[wide].numpy
    for narrow, wide in (
        ("f16", "f32"),
        ("bf16", "f32"),
        ("f8e4m3", "f32"),
        ("f8e5m2", "f32"),
        ("i4", "i8"),
        ("u4", "u8"),
    )
}


def is_float(name: str) -> bool:
    """Whether `name` is a floating-point type."""
    return dtype(name).is_float
