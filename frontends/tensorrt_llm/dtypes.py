"""Element types by the names of TensorRT, PyTorch and numpy, and conversions between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from ...errors import did_you_mean
from ...ir.dtypes import DTYPES, numpy_dtype
from .api import api, register
from .errors import ScriptError

# the element types of TensorRT, with its numbers
DataType = Enum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64 INT4 FP4", start=0)

_IRC = {DataType[row.tensorrt]: name for name, row in DTYPES.items() if row.tensorrt}
_IRC[DataType.FP4] = "f4e2m1"
_DATA_TYPES = {name: member for member, name in _IRC.items()}
_NUMPY = {name: str(row.numpy) for name, row in DTYPES.items()}
# the names that scripts use: those of numpy, and some more
_NAMES = {name: kind for kind, name in _NUMPY.items()} | {
    "float": "f32", "fp32": "f32", "half": "f16", "fp16": "f16", "fp8": "f8e4m3",
    "fp4": "f4e2m1", "nvfp4": "f4e2m1", "qint8": "i8",
}  # fmt: skip


def irc_dtype(dtype: Any) -> str:
    """The name in irc of a DataType, a name such as "float16", a dtype of numpy or of PyTorch."""
    if isinstance(dtype, DataType):
        return _IRC[dtype]
    name = str(dtype)
    if dtype is not None and not isinstance(dtype, str):
        with suppress(TypeError):  # of dtypes that are not numpy's
            name = str(np.dtype(dtype))
    name = name.removeprefix("torch.")
    kind = _NAMES.get(name.lower(), name)
    if kind not in DTYPES:
        near = did_you_mean(name, [*_NAMES, *DTYPES])
        raise ScriptError(f"expected a dtype such as 'float16', found {name!r}{near}")
    return kind


def data_type(dtype: Any) -> DataType:
    """The DataType of anything that `irc_dtype` takes."""
    name = irc_dtype(dtype)
    if name not in _DATA_TYPES:
        raise ScriptError(f"TensorRT has no type for {name}; cast it to another first")
    return _DATA_TYPES[name]


def str_dtype(dtype: Any) -> str:
    """The name in TensorRT-LLM of a dtype, such as "float16"."""
    name = irc_dtype(dtype)
    return {"f8e4m3": "fp8", "f4e2m1": "nvfp4"}.get(name, _NUMPY[name])


def numpy_of(dtype: Any) -> np.dtype[Any]:
    """The numpy dtype of anything that `irc_dtype` takes."""
    return numpy_dtype(irc_dtype(dtype))


def torch_of(dtype: Any) -> Any:
    """The dtype of PyTorch, which the script must have imported."""
    return getattr(_torch(), _NUMPY[irc_dtype(dtype)])


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
        raise ScriptError("PyTorch is not imported; expected `import torch` in the script")
    return sys.modules["torch"]


def _array_of(kind: str) -> Callable[[Any], np.ndarray[Any, Any]]:
    """The function that makes arrays of a dtype."""
    return lambda x: np.array(x, dtype=numpy_dtype(kind))


def dim_resolve_negative(dim: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Dimensions counted from the front, of a tensor with `ndim` of them."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for axis in dims:
        if not -ndim <= axis < ndim:
            expected = f"expected a dimension from {-ndim} to {ndim - 1}"
            raise ScriptError(f"{expected}, found {axis}")
    return tuple(axis % ndim for axis in dims)


_CONVERSIONS = {"trt": data_type, "str": str_dtype, "np": numpy_of, "torch": torch_of}
for _source, (_to, _convert) in product(_CONVERSIONS, _CONVERSIONS.items()):
    if _source != _to:
        api(f"_utils.{_source}_dtype_to_{_to}")(_convert)
for _function in (numpy_to_torch, dim_resolve_negative):
    api(f"_utils.{_function.__name__}")(_function)
api("_utils.torch_to_numpy")(as_array)
_ARRAYS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int32": "i32", "int64": "i64"}
for _name, _kind in {**_ARRAYS, "bool": "bool"}.items():
    api(f"_utils.{_name}_array")(_array_of(_kind))
register("_utils.np_bfloat16", np.dtype(ml_dtypes.bfloat16))
register("_utils.np_float8", np.dtype(ml_dtypes.float8_e4m3fn))
register("bindings.DataType", DataType)
