"""The element types: one row each, with their widths and their names in every library.

Names are texts and numbers are ints, so that no library is imported for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import Error, did_you_mean


@dataclass(frozen=True)
class DType:
    """One element type. None or "" stands for a library that has no such type.

    `bits` is the width in files; types below 8 bits take a byte per element in numpy. `kind` is
    "float", "int", "uint" or "bool". `wider` is the type that numpy and ONNX Runtime compute in,
    where that is another one.
    """

    name: str
    bits: int
    kind: str
    numpy: np.dtype[np.generic]
    onnx: int  # the number in TensorProto.DataType
    onnx_name: str  # as in the type constraint `tensor(float16)`
    safetensors: str
    tensorrt: str  # the member of DataType
    listing: str  # in TensorRT's listing of an engine's layers
    nccl: int | None  # ncclDataType_t
    wider: str = ""

    def nbytes(self, count: int) -> int:
        """The bytes of `count` elements in a file; those of four bits are packed in pairs."""
        return -(-count * self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")


# fmt: off
_F8E4M3, _F8E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
_F8E8M0, _F4E2M1 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn
_ROWS = (
    # name, bits, kind, numpy, onnx, onnx_name, safetensors, tensorrt, listing, nccl, wider
    ("f64", 64, "float", np.float64, 11, "double", "F64", "", "", 8),
    ("f32", 32, "float", np.float32, 1, "float", "F32", "FLOAT", "Float", 7),
    ("f16", 16, "float", np.float16, 10, "float16", "F16", "HALF", "Half", 6, "f32"),
    ("bf16", 16, "float", ml_dtypes.bfloat16, 16, "bfloat16", "BF16", "BF16", "BFloat16", 9, "f32"),
    ("f8e4m3", 8, "float", _F8E4M3, 17, "float8e4m3fn", "F8_E4M3", "FP8", "FP8", None, "f32"),
    ("f8e5m2", 8, "float", _F8E5M2, 19, "float8e5m2", "F8_E5M2", "", "", None, "f32"),
    ("f8e8m0", 8, "float", _F8E8M0, 24, "float8e8m0", "F8_E8M0", "", "FP8UE8M0", None, "f32"),
    ("f4e2m1", 4, "float", _F4E2M1, 23, "float4e2m1", "F4", "", "FP4E2M1", None, "f32"),
    ("i64", 64, "int", np.int64, 7, "int64", "I64", "INT64", "Int64", 4),
    ("i32", 32, "int", np.int32, 6, "int32", "I32", "INT32", "Int32", 2),
    ("i16", 16, "int", np.int16, 5, "int16", "I16", "", "", None),
    ("i8", 8, "int", np.int8, 3, "int8", "I8", "INT8", "Int8", 0),
    ("i4", 4, "int", ml_dtypes.int4, 22, "int4", "", "INT4", "Int4", None, "i8"),
    ("u64", 64, "uint", np.uint64, 13, "uint64", "U64", "", "", 5),
    ("u32", 32, "uint", np.uint32, 12, "uint32", "U32", "", "", 3),
    ("u16", 16, "uint", np.uint16, 4, "uint16", "U16", "", "", None),
    ("u8", 8, "uint", np.uint8, 2, "uint8", "U8", "UINT8", "UInt8", 1),
    ("u4", 4, "uint", ml_dtypes.uint4, 21, "uint4", "", "", "", None, "u8"),
    ("bool", 8, "bool", np.bool_, 9, "bool", "BOOL", "BOOL", "Bool", None),
)
# fmt: on


def _row(name: Any, bits: Any, kind: Any, numpy: Any, *columns: Any) -> DType:
    return DType(name, bits, kind, np.dtype(numpy), *columns)  # type: ignore[call-overload]


DTYPES: dict[str, DType] = {row[0]: _row(*row) for row in _ROWS}
_BY_NUMPY = {d.numpy: d for d in DTYPES.values()}


def dtype(name: str) -> DType:
    """The element type called `name`; an Error names the nearest one."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise Error(f"no dtype called {name!r}{did_you_mean(name, DTYPES)}")
    return dtype


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy dtype of elements of `name`."""
    return dtype(name).numpy


def largest(name: str) -> float:
    """The largest finite number of `name`; of integers no number is larger."""
    kind = dtype(name)
    finfo: Any = ml_dtypes.finfo
    return float(finfo(kind.numpy).max) if kind.is_float else 2.0**kind.bits


def integer_range(name: str) -> tuple[int, int]:
    """The least and the greatest integer of `name`."""
    iinfo: Any = ml_dtypes.iinfo
    limits = iinfo(numpy_dtype(name))
    return int(limits.min), int(limits.max)


def dtype_of(array: np.ndarray) -> str:
    """The name of a numpy array's element type."""
    dtype = _BY_NUMPY.get(array.dtype)
    if dtype is None:
        raise Error(f"arrays of {array.dtype} have no dtype in irc; use one of {', '.join(DTYPES)}")
    return dtype.name


def widened(array: np.ndarray) -> np.ndarray:
    """The array in the dtype that numpy computes with: narrow floats as f32, i4 and u4 as bytes.

    Integers wrap, so a result in a byte, converted back to 4 bits, is the result in 4 bits.
    """
    dtype = _BY_NUMPY.get(array.dtype)
    return array.astype(numpy_dtype(dtype.wider)) if dtype is not None and dtype.wider else array


def packed(array: np.ndarray) -> np.ndarray:
    """Elements of four bits as bytes, two in each, the first in the low half (ONNX, TensorRT)."""
    halves = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if halves.size % 2:
        halves = np.append(halves, np.uint8(0))
    pairs = halves.view("<u2") & 0x0F0F
    return (pairs | pairs >> 4).astype(np.uint8)


def unpacked(halves: np.ndarray, name: str) -> np.ndarray:
    """Bytes [..., n] as elements [..., 2 * n] of a dtype of four bits."""
    both = np.stack([halves & 0xF, halves >> 4], axis=-1)
    return both.reshape(*halves.shape[:-1], 2 * halves.shape[-1]).view(numpy_dtype(name))


def is_float(name: str) -> bool:
    """Whether `name` is a floating-point type."""
    return dtype(name).is_float


def lossless(source: str, target: str) -> bool:
    """Whether every value of dtype `source`, NaN and infinities too, is one of `target`."""
    a, b = dtype(source), dtype(target)
    if a is b:
        return True
    if a.kind == "bool":
        return b.name != "f8e8m0"  # which has no zero
    if b.kind == "bool":
        return False
    if a.is_float:
        return b.is_float and _floats_in_floats(a, b)
    low, high = integer_range(source)
    if b.is_float:
        mantissa, most, _ = _limits(b)
        return max(-low, high) <= min(2 ** (mantissa + 1), most)
    target_low, target_high = integer_range(target)
    return target_low <= low and high <= target_high


def _floats_in_floats(a: DType, b: DType) -> bool:
    if b.name in ("f8e4m3", "f8e8m0", "f4e2m1") and (a.name, b.name) != ("f4e2m1", "f8e4m3"):
        return False  # they have no infinities, and f4e2m1 not even NaN
    mantissa, largest, smallest = _limits(a)
    more, larger, smaller = _limits(b)
    return mantissa <= more and largest <= larger and smallest >= smaller


def _limits(kind: DType) -> tuple[int, float, float]:
    """(stored bits of the mantissa, the largest finite number, the smallest positive one)."""
    finfo: Any = ml_dtypes.finfo
    limits = finfo(kind.numpy)
    return int(limits.nmant), float(limits.max), float(limits.smallest_subnormal)
