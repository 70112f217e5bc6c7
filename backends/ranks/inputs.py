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
from irc.ir.dtypes import dtype, numpy_dtype
from irc.ir.types import TensorType
from irc.weights.checkpoint import convert

Sizes = dict[str, int]


class Inputs:
    """The arguments of a call: each has the dtype of its port, or f32, i8 or u8 in place of a
    narrower one, and is rounded."""

    def __init__(self, name: str, ports: Sequence[Port]) -> None:
        self._ports = {port.name: port for port in ports}
        self._function = Function(name, [(p.name, TensorType(p.dtype, p.shape)) for p in ports])
        self._known: dict[Any, Sizes] = {}

    def bind(self, given: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], Sizes]:
        """(contiguous arrays by name as they are computed, the size of every symbol), or an
        Error."""
        arrays = {name: self._array(name, value) for name, value in given.items()}
        key = tuple((name, array.dtype, array.shape) for name, array in arrays.items())
        sizes = self._known.get(key)
        if sizes is None:
            _, sizes = bind_inputs(self._function, arrays, {})
            self._known = {key: sizes}  # a decode step looks like the one before
        for name, array in arrays.items():
            port = self._ports[name]
            arrays[name] = convert(array, port.computed or port.dtype)
        return arrays, sizes

    def _array(self, name: str, value: Any) -> np.ndarray:
        array = np.asarray(value)
        port = self._ports.get(name)
        wider = "" if port is None else dtype(port.dtype).wider
        if port is not None and wider and array.dtype == numpy_dtype(wider):
            array = convert(array, port.dtype)
        return np.ascontiguousarray(array) if array.ndim else array


def sized(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with its symbols replaced by their sizes."""
    found = tuple(bind(dim, sizes) for dim in shape)
    for dim in found:
        if isinstance(dim, Dim):
            raise Error(f"{next(dim.symbols())} has no size: no input has this dimension")
    return tuple(int(str(dim)) for dim in found)
