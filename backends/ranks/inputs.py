"""Checks and converts the inputs of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irc.backends.base import Port
from irc.backends.reference.inputs import bind_inputs
from irc.errors import Error
from irc.ir.core import Function
from irc.ir.dims import Dim, bind
from irc.ir.dtypes import DTYPES, numpy_dtype
from irc.ir.types import TensorType
from irc.weights.checkpoint import convert

Sizes = dict[str, int]
_WIDER = {each.numpy: each.wider for each in DTYPES.values() if each.wider}


class Inputs:
    """The arguments of a call. Values narrower than f32, i8 or u8 are widened to these."""

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
        wide = _WIDER.get(array.dtype)
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
