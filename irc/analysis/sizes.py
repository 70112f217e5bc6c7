"""Sizes of local tensors, in elements and bytes, with numbers for the symbols of a module."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..errors import Error, did_you_mean
from ..ir.core import Module
from ..ir.dims import Dim, DimLike, bind
from ..ir.dtypes import dtype
from ..ir.mesh import Mesh
from ..ir.types import TensorType


class LocalSizes:
    """Local shapes, with a size for every symbol.

    It reads types of both views: sharded dimensions are divided, padding included. `past` is the
    number of tokens in the caches before the call.
    """

    def __init__(self, mesh: Mesh, symbols: Mapping[str, int], past: int = 0) -> None:
        self.mesh, self.symbols, self.past = mesh, dict(symbols), past
        self._shapes: dict[TensorType, tuple[int, ...]] = {}

    def dim(self, size: DimLike) -> int:
        """A dimension as a number; an Error names a symbol without a size."""
        bound = bind(size, self.symbols)
        if isinstance(bound, Dim):
            name = next(bound.symbols())
            hint = did_you_mean(name, self.symbols)
            raise Error(
                f"{name} has no size{hint}; give it a range, as in --dims {name}=1:128:1024"
            )
        return bound

    def shape(self, type: TensorType) -> tuple[int, ...]:
        """The local shape."""
        shape = self._shapes.get(type)
        if shape is None:
            pairs = zip(type.shape, type.axes, strict=True)
            shape = tuple(-(-self.dim(n) // self.mesh.group_size(axes)) for n, axes in pairs)
            self._shapes[type] = shape
        return shape

    def count(self, type: TensorType) -> int:
        """The number of local elements."""
        return prod(self.shape(type))

    def bytes(self, type: TensorType) -> int:
        """The local bytes; elements of 4 bits are two to a byte."""
        return dtype(type.dtype).nbytes(self.count(type))


def typical_sizes(module: Module, **given: int) -> dict[str, int]:
    """The typical size of every symbol of a module, or that of `given`."""
    return {name: typical for name, (_, typical, _) in module.dims.items()} | given
