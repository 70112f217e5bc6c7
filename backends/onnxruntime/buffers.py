"""Memory for values between segments and collectives, reused after their last use."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
from onnx.onnx_ml_pb2 import ValueInfoProto

from irc.backends.onnx.graph import DTYPES
from irc.backends.onnxruntime.segments import Collective, Segment
from irc.backends.ranks.inputs import Sizes, sized
from irc.errors import Error
from irc.ir.dims import Dim, DimLike, Shape
from irc.ir.dtypes import numpy_dtype
from irc.text.literals import parse_dim

Array: TypeAlias = np.ndarray[Any, Any]
ALIGNMENT = 64  # bytes; a cache line
_KINDS = {number: numpy_dtype(name) for name, number in DTYPES.items()}


@dataclass(frozen=True)
class Between:
    """A value between steps: the first and last step that use it, its dtype and shape.

    The shape is None if it is known at run time only.
    """

    first: int
    last: int
    dtype: np.dtype[Any]
    shape: Shape | None


def between(
    steps: Sequence[Segment | Collective],
    ports: frozenset[str],
    types: Mapping[str, ValueInfoProto],
) -> dict[str, Between]:
    """The values that steps compute for later steps; `ports`: the model's inputs and outputs."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        one = isinstance(step, Collective)
        first |= dict.fromkeys([step.result] if one else step.outputs, i)
        last |= dict.fromkeys([step.operand] if one else step.inputs, i)
    known = {s for name in ports for s in _symbols(_shape(types[name]))}
    found: dict[str, Between] = {}
    for name in first:
        if name in ports:
            continue
        shape = _shape(types[name])
        is_known = shape is not None and known.issuperset(_symbols(shape))
        kind = _KINDS[types[name].type.tensor_type.elem_type]
        found[name] = Between(first[name], last[name], kind, shape if is_known else None)
    return found


def _shape(type: ValueInfoProto) -> Shape | None:
    """The shape in a model; None if it leaves a dimension open."""
    if not type.type.tensor_type.HasField("shape"):
        return None
    dims: list[DimLike] = []
    for dim in type.type.tensor_type.shape.dim:
        if dim.HasField("dim_value"):
            dims.append(dim.dim_value)
            continue
        try:
            dims.append(parse_dim(dim.dim_param))
        except Error:
            return None  # shape inference names dimensions in its own way
    return tuple(dims)


def _symbols(shape: Shape | None) -> set[str]:
    return {name for dim in shape or () if isinstance(dim, Dim) for name in dim.symbols()}


def place(values: Mapping[str, Between], sizes: Sizes) -> dict[str, Array]:
    """Arrays for the values of known shapes; two share memory if no step uses both."""
    free: list[tuple[int, int, Array]] = []  # by size
    leaving: list[tuple[int, int, Array]] = []  # by last step
    placed: dict[str, Array] = {}
    for n, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1].first)):
        if value.shape is None:
            continue
        while leaving and leaving[0][0] < value.first:
            memory = leaving.pop(0)[2]
            insort(free, (memory.nbytes, n, memory), key=lambda entry: entry[:2])
        shape = sized(value.shape, sizes)
        count = prod(shape) * value.dtype.itemsize
        memory = _take(free, count)
        insort(leaving, (value.last, n, memory), key=lambda entry: entry[:2])
        placed[name] = memory[:count].view(value.dtype).reshape(shape)
    return placed


def _take(free: list[tuple[int, int, Array]], count: int) -> Array:
    """The smallest free memory of `count` bytes, unless it is twice as large; else new memory."""
    for i, (size, _, memory) in enumerate(free):
        if count <= size <= 2 * count:
            del free[i]
            return memory
    raw = np.zeros(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count]
