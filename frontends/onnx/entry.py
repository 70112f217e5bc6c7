"""What is known of a value of an ONNX graph while it is read, and of the node that made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from irc.core import Value
from irc.dims import DimLike, Shape
from irc.errors import Error
from irc.frontends.onnx.tensors import Data
from irc.source import Loc

Read = TypeVar("Read")
Content: TypeAlias = np.ndarray[Any, Any]  # of objects: numbers, sizes, true and false


@dataclass(eq=False)
class Entry:
    """A value of the graph. What it is in the IR is found when somebody asks for it.

    `content` are its elements, where they are known while reading: shapes and what is computed from
    them, and small constants. `base` is an IR value with the same elements in row-major order but
    maybe another shape: reshapes are not made until the shape itself is needed. `tokens` is the
    [B, S, H*D] of which this is the form by heads, [B, H, S, D]. `make` makes the value.
    """

    dtype: str
    shape: Shape
    value: Value | None = None
    content: Content | None = None
    base: Value | None = None
    tokens: Value | None = None
    data: Data | None = None
    make: Callable[[], Value] | None = None
    node: Node | None = None
    name: str = ""
    was: Entry | None = None  # before a cast that keeps every value

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


@dataclass(eq=False)
class Node:
    """A node: the standard operators have the domain "".

    `inputs` are None where an optional one is left out. In a file of our own, `opname` is the
    operation that it was emitted for, and `final` whether its result was named after that
    operation's. They decide between equal readings, never what the node means.
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
    opname: str = ""
    final: bool = False
    own: bool = False
    misuse: str | None = None  # what ONNX itself forbids about it

    def has(self, index: int) -> bool:
        """Whether an optional input is there."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def input(self, index: int) -> Entry:
        """An input that must be there."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise Error(f"{self.kind} lacks its input {index}")
        return found

    def shaped(self, index: int, least: int, most: int | None = None) -> Entry:
        """An input that must be there, with `least` dimensions or more, and no more than `most`."""
        found = self.input(index)
        if found.rank < least or (most is not None and found.rank > most):
            raise Error(f"input {index} of {self.kind} cannot have {found.rank} dimensions")
        return found

    def optional(self, index: int) -> Entry | None:
        """An input that need not be there."""
        return self.inputs[index] if index < len(self.inputs) else None

    def ints(self, name: str) -> list[int] | None:
        """A list of integers among the attributes."""
        if self.attributes.get(name) is None:
            return None
        return self._given(name, None, lambda found: [int(n) for n in found], "list of integers")

    def integer(self, name: str, default: int) -> int:
        """An integer among the attributes; plugins have them as text."""
        return self._given(name, default, int, "integer")

    def real(self, name: str, default: float) -> float:
        """A number among the attributes: the shortest decimal that is this f32."""
        return self._given(name, default, shortest, "number")

    def decimal(self, name: str, default: str) -> float:
        """A number that is written as a text."""
        return self._given(name, default, float, "number")

    def text(self, name: str, default: str) -> str:
        """A string among the attributes."""
        return str(self.attributes.get(name, default))

    def _given(self, name: str, default: Any, read: Callable[[Any], Read], what: str) -> Read:
        """An attribute; an Error where it is not what it should be."""
        found = self.attributes.get(name, default)
        try:
            return read(found)
        except (TypeError, ValueError):
            reason = f"{self.kind} has {name}={found!r}, which is no {what}"
            raise Error(reason).at(loc=self.loc) from None


def shortest(number: float) -> float:
    """The number with the fewest digits that is the same in f32."""
    return float(str(np.float32(number)))


def sizes(*values: DimLike) -> Content:
    """A content of one dimension."""
    found = np.empty(len(values), object)
    found[:] = values
    return found
