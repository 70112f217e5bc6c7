"""Numbers for the symbols of a module: what one rank holds of a type, in elements and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..core import Module
from ..dims import Dim, DimLike, bind
from ..dtypes import dtype
from ..errors import Error, did_you_mean
from ..mesh import Mesh
from ..types import TensorType


class LocalSizes:
    """Shapes of one rank, with a size for every symbol.

    It reads types of both views: what the type says is split is divided, padding included.
    `past` is how many tokens stand in the caches before the call.
    """

    def __init__(self, mesh: Mesh, symbols: Mapping[str, int], past: int = 0) -> None:
        self.mesh, self.symbols, self.past = mesh, dict(symbols), past
        self._shapes: dict[TensorType, tuple[int, ...]] = {}
        self._bytes: dict[TensorType, int] = {}

    def dim(self, size: DimLike) -> int:
        """A dimension as a number; an Error names a symbol without a size."""
        found = bind(size, self.symbols)
        if isinstance(found, Dim):
            name = next(found.symbols())
            hint = did_you_mean(name, self.symbols)
            raise Error(
                f"{name} has no size{hint}; give it a range, as in --dims {name}=1:128:1024"
            )
        return found

    def shape(self, type: TensorType) -> tuple[int, ...]:
        """The shape of one rank's part."""
        known = self._shapes.get(type)
        if known is None:
            pairs = zip(type.shape, type.axes, strict=True)
            known = tuple(-(-self.dim(n) // self.mesh.ways(axes)) for n, axes in pairs)
            self._shapes[type] = known
        return known

    def count(self, type: TensorType) -> int:
        """The elements of one rank's part."""
        return prod(self.shape(type))

    def bytes(self, type: TensorType) -> int:
        """The bytes of one rank's part; elements of 4 bits lie two to a byte."""
        known = self._bytes.get(type)
        if known is None:
            known = self._bytes[type] = dtype(type.dtype).nbytes(self.count(type))
        return known


def typical_sizes(module: Module, **given: int) -> dict[str, int]:
    """The typical size of every symbol of a module, or the given one."""
    return {name: typical for name, (_, typical, _) in module.dims.items()} | given
