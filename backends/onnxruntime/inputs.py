"""Checks and converts what is fed to a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irc.backends.base import Port, Ports
from irc.backends.reference.inputs import bind_inputs
from irc.checkpoint import convert
from irc.core import Function
from irc.dims import Dim, bind
from irc.dtypes import numpy_dtype
from irc.errors import Error
from irc.text.literals import parse_dim
from irc.types import TensorType

Sizes = dict[str, int]
_NARROW = tuple(numpy_dtype(name) for name in ("f16", "bf16", "f8e4m3", "f8e5m2"))


def port_of(fact: Mapping[str, Any], state: bool = False) -> Port:
    """A port from its entry in the manifest."""
    shape = tuple(d if isinstance(d, int) else parse_dim(d) for d in fact["shape"])
    return Port(fact["name"], fact["dtype"], shape, state)


def ports_of_facts(facts: Mapping[str, Any]) -> Ports:
    """The ports that the manifest lists."""
    return Ports(
        tuple(port_of(port) for port in facts["inputs"]),
        tuple(port_of(port, state=True) for port in facts["states"]),
        tuple(port_of(port) for port in facts["outputs"]),
    )


class Inputs:
    """The arguments that a call takes. Narrow floats are accepted for f32 and widened."""

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
        if array.dtype in _NARROW and self._wanted.get(name) == np.float32:
            array = convert(array, "f32")
        return np.ascontiguousarray(array) if array.ndim else array


def sized(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with its symbols replaced by their sizes."""
    found = tuple(bind(dim, sizes) for dim in shape)
    for dim in found:
        if isinstance(dim, Dim):
            raise Error(f"{next(dim.symbols())} has no size: no input has this dimension")
    return tuple(int(str(dim)) for dim in found)
