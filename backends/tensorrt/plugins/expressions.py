"""Dims that a shape rule computes with while TensorRT builds: integers known later.

A rule written for integers works on these: `+ - * //` among each other and with integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Expression:
    """One dim of an input, or what a rule makes of it. `node` is TensorRT's IDimensionExpr."""

    __slots__ = ("_builder", "_trt", "node")

    def __init__(self, trt: Any, builder: Any, node: Any) -> None:
        self._trt, self._builder, self.node = trt, builder, node

    @property
    def known(self) -> int | None:
        """The value, where it is a constant of the network."""
        return int(self.node.get_constant_value()) if self.node.is_constant() else None

    def __add__(self, other: Any) -> Expression:
        return self._of("SUM", self, other)

    def __sub__(self, other: Any) -> Expression:
        return self._of("SUB", self, other)

    def __mul__(self, other: Any) -> Expression:
        return self._of("PROD", self, other)

    def __floordiv__(self, other: Any) -> Expression:
        return self._of("FLOOR_DIV", self, other)

    def __radd__(self, other: Any) -> Expression:
        return self._of("SUM", other, self)

    def __rsub__(self, other: Any) -> Expression:
        return self._of("SUB", other, self)

    def __rmul__(self, other: Any) -> Expression:
        return self._of("PROD", other, self)

    def __rfloordiv__(self, other: Any) -> Expression:
        return self._of("FLOOR_DIV", other, self)

    def _of(self, operation: str, first: Any, second: Any) -> Expression:
        nodes = [_node(self._builder, each) for each in (first, second)]
        kind = getattr(self._trt.DimensionOperation, operation)
        return Expression(self._trt, self._builder, self._builder.operation(kind, *nodes))


def known(dim: Any) -> int | None:
    """The value of a dim, or None where it is known only when the engine runs."""
    return dim.known if isinstance(dim, Expression) else dim if isinstance(dim, int) else None


def unwrapped(builder: Any, shape: Sequence[Any]) -> list[Any]:
    """TensorRT's expressions of a shape."""
    return [_node(builder, each) for each in shape]


def _node(builder: Any, dim: Any) -> Any:
    return dim.node if isinstance(dim, Expression) else builder.constant(int(dim))
