"""What is known of a value of an ONNX graph while it is read, and of the node that made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from irc.errors import Error
from irc.frontends.onnx.tensors import Data
from irc.ir.core import Value
from irc.ir.dims import DimLike, Shape
from irc.source import Loc

Read = TypeVar("Read")
Content: TypeAlias = np.ndarray[Any, Any]  # of objects: numbers, sizes, true and false


@dataclass(eq=False)
class Entry:
    """A value of the graph: an IR value, elements that are known while reading, or a tensor.

    `content` are known elements: shapes and what is computed from them, and small constants.
    `data` is a tensor of the file. Builder.get makes an IR value of either. `node` made the value.
    """

    dtype: str
    shape: Shape
    value: Value | None = None
    content: Content | None = None
    data: Data | None = None
    node: Node | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


@dataclass(eq=False)
class Node:
    """A node; the standard operators have the domain "".

    `inputs` are None where an optional one is absent.
    """

    kind: str
    domain: str
    name: str
    number: int
    opset: int
    inputs: list[Entry | None]
    outputs: list[str]
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    loc: Loc | None = None
    misuse: str | None = None  # what ONNX itself forbids about it

    def has(self, index: int) -> bool:
        """Whether an optional input is present."""
        return self.optional(index) is not None

    def input(self, index: int) -> Entry:
        """A required input."""
        found = self.optional(index)
        if found is None:
            raise Error(f"{self.kind} lacks its input {index}")
        return found

    def shaped(self, index: int, least: int, most: int | None = None) -> Entry:
        """A required input with `least` dimensions or more, and no more than `most`."""
        found = self.input(index)
        if found.ndim < least or (most is not None and found.ndim > most):
            raise Error(f"input {index} of {self.kind} cannot have {found.ndim} dimensions")
        return found

    def optional(self, index: int) -> Entry | None:
        """An input, or None where it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def present(self) -> list[Entry]:
        """All inputs that are there."""
        return [entry for entry in self.inputs if entry is not None]

    def wants(self, index: int) -> bool:
        """Whether an output has a name, so that something may use it."""
        return index < len(self.outputs) and bool(self.outputs[index])

    def axis(self, ndim: int, default: int, name: str = "axis") -> int:
        """An attribute that names a dimension, counted from the front."""
        axis = self.integer(name, default)
        if not -ndim <= axis < ndim:
            raise Error(f"{self.kind} along {name} {axis} of {ndim} dimensions")
        return axis % ndim

    def ints(self, name: str) -> list[int] | None:
        """An attribute that is a list of integers."""
        if self.attributes.get(name) is None:
            return None
        return self._read(name, None, lambda found: [int(n) for n in found], "a list of integers")

    def integer(self, name: str, default: int) -> int:
        """An attribute that is an integer; plugins write it as text."""
        return self._read(name, default, int, "an integer")

    def real(self, name: str, default: float) -> float:
        """An attribute that is a number, or text of one: the shortest decimal that is this f32."""
        return self._read(name, default, shortest, "a number")

    def text(self, name: str, default: str) -> str:
        """An attribute that is a string."""
        return str(self.attributes.get(name, default))

    def _read(self, name: str, default: Any, read: Callable[[Any], Read], what: str) -> Read:
        found = self.attributes.get(name, default)
        try:
            return read(found)
        except (TypeError, ValueError):
            reason = f"{self.kind} has {name}={found!r}; expected {what}"
            raise Error(reason).at(loc=self.loc) from None


def shortest(number: float) -> float:
    """The number with the fewest digits that is the same in f32."""
    return float(str(np.float32(number)))


def sizes(*values: DimLike | float) -> Content:
    """A content of one dimension."""
    found = np.empty(len(values), object)
    found[:] = values
    return found
