"""Checks and converts what is fed to a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irc.backends.base import Port
from irc.backends.reference.inputs import bind_inputs
from irc.checkpoint import convert
from irc.core import Function
from irc.dims import Dim, bind
from irc.dtypes import numpy_dtype
from irc.errors import Error
from irc.types import TensorType

Sizes = dict[str, int]
_WIDER = {"f16": "f32", "bf16": "f32", "f8e4m3": "f32", "f8e5m2": "f32", "i4": "i8", "u4": "u8"}
_WIDENED = {numpy_dtype(narrow): wide for narrow, wide in _WIDER.items()}


class Inputs:
    """The arguments that a call takes. What is narrower than f32, i8 or u8 is widened to it."""

    def __init__(self, name: str, ports: Sequence[Port]) -> None:
        self._wanted = {port.name: numpy_dtype(port.dtype) for port in ports}
        self._function = Function(name, [(p.name, TensorType(p.dtype, p.shape)) for p in ports])
        self._known: dict[Any, Sizes] = {}

    def bind(self, given: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], Sizes]:
        """(contiguous arrays by name, the size of every symbol), or an Error."""
        arrays = {name: self._array(name, value) for name, value in given.items()}
        key = tuple((name, array.dtype, array.shape) for name, array in arrays.items())
        sizes = self._known.get(key)
        if sizes is None:
            _, sizes = bind_inputs(self._function, arrays, {})
            self._known = {key: sizes}  # a decode step looks like the one before
        return arrays, sizes

    def _array(self, name: str, value: Any) -> np.ndarray:
        array = np.asarray(value)
        wide = _WIDENED.get(array.dtype)
        if wide is not None and self._wanted.get(name) == numpy_dtype(wide):
            array = convert(array, wide)
        return np.ascontiguousarray(array) if array.ndim else array


def sized(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with its symbols replaced by their sizes."""
    found = tuple(bind(dim, sizes) for dim in shape)
    for dim in found:
        if isinstance(dim, Dim):
            raise Error(f"{next(dim.symbols())} has no size: no input has this dimension")
    return tuple(int(str(dim)) for dim in found)
