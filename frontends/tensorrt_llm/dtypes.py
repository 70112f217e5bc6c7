"""Element types by the names of TensorRT, PyTorch and numpy, and conversions between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np

from ...errors import Error, did_you_mean
from ...ir.dtypes import DTYPES, numpy_dtype
from ...source import here
from .api import api, register


class DataType(Enum):
    """The element types of TensorRT, with its numbers."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9
    FP4 = 10


_IRC = {DataType[row.tensorrt]: name for name, row in DTYPES.items() if row.tensorrt}
_IRC[DataType.FP4] = "f4e2m1"
_DATA_TYPES = {name: member for member, name in _IRC.items()}
# the names that scripts use: those of numpy, and some more
_NAMES = {str(row.numpy): name for name, row in DTYPES.items()} | {
    "float": "f32",
    "fp32": "f32",
    "half": "f16",
    "fp16": "f16",
    "fp8": "f8e4m3",
    "fp4": "f4e2m1",
    "nvfp4": "f4e2m1",
}
_STR = {name: str(row.numpy) for name, row in DTYPES.items()} | {"f8e4m3": "fp8", "f4e2m1": "nvfp4"}


def irc_dtype(dtype: Any) -> str:
    """The name in irc of a DataType, a name such as "float16", a dtype of numpy or of PyTorch."""
    if isinstance(dtype, DataType):
        return _IRC[dtype]
    if type(dtype).__module__ == "torch":
        dtype = str(dtype).removeprefix("torch.")
    if dtype is not None and not isinstance(dtype, str):
        try:
            dtype = str(np.dtype(dtype))
        except TypeError:
            dtype = str(dtype)
    dtype = str(dtype)
    found = _NAMES.get(dtype.lower(), dtype)
    if found in DTYPES:
        return found
    guess = did_you_mean(dtype, [*_NAMES, *DTYPES])
    raise Error(f"expected a dtype such as 'float16', found {dtype!r}{guess}", loc=here())


def data_type(dtype: Any) -> DataType:
    """The DataType of anything that `irc_dtype` takes."""
    name = irc_dtype(dtype)
    if name not in _DATA_TYPES:
        raise Error(f"TensorRT has no type for {name}; cast it to another first", loc=here())
    return _DATA_TYPES[name]


def str_dtype(dtype: Any) -> str:
    """The name in TensorRT-LLM of a dtype, such as "float16"."""
    name = irc_dtype(dtype)
    return _STR.get(name, name)


def numpy_of(dtype: Any) -> np.dtype[Any]:
    """The numpy dtype of anything that `irc_dtype` takes."""
    return numpy_dtype(irc_dtype(dtype))


def torch_of(dtype: Any) -> Any:
    """The dtype of PyTorch, which the script must have imported."""
    return getattr(_torch(), {"fp8": "float8_e4m3fn"}.get(name := str_dtype(dtype), name))


# What holds the bits of floats that PyTorch and ml_dtypes have, and numpy lacks.
_BITS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def as_array(x: Any) -> np.ndarray[Any, Any]:
    """A numpy array of a number, a list, an array, or a tensor of PyTorch."""
    if type(x).__module__.partition(".")[0] != "torch":
        return np.asarray(x)
    tensor, name = x.detach().cpu().contiguous(), str(x.dtype).removeprefix("torch.")
    if name in _BITS:
        return tensor.view(getattr(_torch(), _BITS[name])).numpy().view(name)
    return tensor.numpy()


def numpy_to_torch(x: np.ndarray[Any, Any]) -> Any:
    """A tensor of PyTorch with the numbers of an array."""
    torch, name = _torch(), x.dtype.name
    if name in _BITS:
        return torch.from_numpy(x.view(_BITS[name])).view(getattr(torch, name))
    return torch.from_numpy(x)


def _torch() -> Any:
    if "torch" not in sys.modules:
        raise Error("PyTorch is not imported; expected `import torch` in the script", loc=here())
    return sys.modules["torch"]


def numpy_to_dtype(x: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """An array converted to a dtype."""
    return as_array(x).astype(numpy_of(dtype))


def _array_of(dtype: Any) -> Callable[[Any], np.ndarray[Any, Any]]:
    """The function that makes arrays of a dtype."""

    def function(x: Any) -> np.ndarray[Any, Any]:
        return np.array(x, dtype=dtype)

    return function


fp32_array, fp16_array = _array_of(np.float32), _array_of(np.float16)
bf16_array, bool_array = _array_of(ml_dtypes.bfloat16), _array_of(np.bool_)
int32_array, int64_array = _array_of(np.int32), _array_of(np.int64)


def dim_resolve_negative(dim: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Dimensions counted from the front, of a tensor with `ndim` of them."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for each in dims:
        if not -ndim <= each < ndim:
            raise Error(
                f"expected a dimension from {-ndim} to {ndim - 1}, found {each}", loc=here()
            )
    return tuple(each % ndim for each in dims)


def dim_to_trt_axes(dim: int | Sequence[int]) -> int:
    """Dimensions as a mask of bits."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return sum(1 << each for each in dims)


def trt_axes_to_dim(axes: int) -> list[int]:
    """The dimensions of a mask of bits."""
    return [dim for dim in range(axes.bit_length()) if axes >> dim & 1]


# The names of tensorrt_llm._utils for these conversions.
str_dtype_to_trt = np_dtype_to_trt = torch_dtype_to_trt = data_type
trt_dtype_to_str = torch_dtype_to_str = np_dtype_to_str = str_dtype
trt_dtype_to_np = str_dtype_to_np = torch_dtype_to_np = numpy_of
trt_dtype_to_torch = str_dtype_to_torch = np_dtype_to_torch = torch_of
torch_to_numpy = as_array
np_bfloat16 = np.dtype(ml_dtypes.bfloat16)
np_float8 = np.dtype(ml_dtypes.float8_e4m3fn)

_CONVERSIONS = """
  str_dtype_to_trt str_dtype_to_np str_dtype_to_torch trt_dtype_to_np trt_dtype_to_str
  trt_dtype_to_torch np_dtype_to_trt np_dtype_to_torch np_dtype_to_str torch_dtype_to_trt
  torch_dtype_to_np torch_dtype_to_str torch_to_numpy numpy_to_torch numpy_to_dtype fp16_array
  fp32_array bf16_array int32_array int64_array bool_array dim_resolve_negative dim_to_trt_axes
  trt_axes_to_dim np_bfloat16 np_float8
"""
for _name in _CONVERSIONS.split():
    api(f"_utils.{_name}")(globals()[_name])
register("bindings.DataType", DataType)
