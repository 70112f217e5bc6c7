"""Writes one rank's operations: the local values of global ones, and the small steps between."""

from __future__ import annotations

from collections.abc import Set

from irc.core import Function, Module, Op, Value, Weight
from irc.dims import DimLike
from irc.dtypes import is_float
from irc.ops import (
    Cast,
    Constant,
    Full,
    Gather,
    Iota,
    Lt,
    Mul,
    Pad,
    Rank,
    ReduceSum,
    Reshape,
    Slice,
    Sub,
    Where,
)
from irc.source import Loc
from irc.types import Axes, TensorType

from .tails import Tails


class Builder:
    """Appends local operations to a function. `values` maps global values to local ones.

    `whole` has the global types of the weights; `zeros`, of tables that got rows of zeros behind
    those of each rank, the number of the first. `padded` are the global arguments whose padding is
    zeros.
    """

    def __init__(
        self,
        module: Module,
        function: Function,
        values: dict[Value, Value],
        whole: dict[Weight, TensorType],
        made: dict[Function, Function],
        zeros: dict[Value, int] | None = None,
        padded: Set[Value] = frozenset(),
    ) -> None:
        self.module, self.mesh, self.function = module, module.mesh, function
        self.values, self.whole, self.made = values, whole, made
        self.zeros: dict[Value, int] = zeros or {}
        self.loc: Loc | None = None
        self.kept: set[Value] = set()  # results that stand for several global values
        self.tails = Tails(self.type, padded)
        self._ranks: dict[tuple[Axes, str], Value] = {}
        self._starts: dict[tuple[Axes, int, str], Value] = {}
        self._real: dict[tuple[Axes, int, DimLike], Value] = {}
        self._constants: dict[tuple[float, str], Value] = {}

    def local(self, value: Value) -> Value:
        """The local value of a global one; a weight is its own."""
        return self.values.get(value, value)

    def type(self, value: Value) -> TensorType:
        """The global type of a global value."""
        return self.whole[value] if isinstance(value, Weight) else value.type

    def add(self, op: Op) -> Value:
        """Append an operation of one result, at the place of the operation being localized."""
        return self.add_all(op)[0]

    def add_all(self, op: Op) -> tuple[Value, ...]:
        """Append an operation; its results."""
        op.loc = self.loc
        self.function.append(op)
        return op.results

    def rank(self, axes: Axes, dtype: str = "i32") -> Value:
        """This rank's position along the axes, made once per function."""
        known = self._ranks.get((axes, dtype))
        if known is None:
            if dtype == "i32":
                known = self.add(Rank(axis=".".join(axes)))
                known.name = f"rank_{'_'.join(axes)}"
            else:
                known = self.add(Cast(self.rank(axes), dtype=dtype))
            self._ranks[axes, dtype] = known
            self.kept.add(known)
        return known

    def constant(self, value: float, dtype: str) -> Value:
        """A scalar, made once per function."""
        known = self._constants.get((value, dtype))
        if known is None:
            number = float(value) if is_float(dtype) else value
            known = self.add(Constant(values=(number,), dtype=dtype))
            self._constants[value, dtype] = known
            self.kept.add(known)
        return known

    def size(self, size: DimLike) -> Value:
        """A size as i32[], also where it is known at run time only."""
        if isinstance(size, int):
            return self.constant(size, "i32")
        ones = self.add(Full(value=1, shape=(size,), dtype="i32"))
        return self.add(ReduceSum(ones, dims=(0,)))

    def start(self, axes: Axes, part: DimLike, dtype: str = "i32") -> Value:
        """Where this rank's part begins, in a dimension of such parts; made once per function."""
        if not isinstance(part, int):
            raise TypeError("parts of symbolic size are even; nothing needs their start")
        known = self._starts.get((axes, part, dtype))
        if known is None:
            known = self.add(Mul(self.rank(axes, dtype), self.constant(part, dtype)))
            known.name = f"start_{'_'.join(axes)}"
            self._starts[axes, part, dtype] = known
            self.kept.add(known)
        return known

    def masked(self, x: Value, dim: int, size: int, axes: Axes, fill: float = 0) -> Value:
        """`x` with `fill` where its part of a dimension of `size` is padding."""
        part = x.type.shape[dim]
        mask = self.real(axes, size, part)
        if x.type.rank > 1:
            shape = tuple(part if i == dim else 1 for i in range(x.type.rank))
            mask = self.add(Reshape(mask, shape=shape))
        return self.add(Where(mask, x, self.constant(fill, x.type.dtype)))

    def real(self, axes: Axes, size: int, part: DimLike) -> Value:
        """bool [part]: which places of a part are no padding, made once per function."""
        known = self._real.get((axes, size, part))
        if known is None:
            left = self.add(Sub(self.constant(size, "i32"), self.start(axes, part)))
            known = self.add(Lt(self.add(Iota(size=part)), left))
            known.name = f"real_{'_'.join(axes)}"
            self._real[axes, size, part] = known
            self.kept.add(known)
        return known

    def padded(self, x: Value, dim: int, size: DimLike) -> Value:
        """`x` with zeros behind, up to `size` in one dimension."""
        missing = size - x.type.shape[dim]
        if missing == 0:
            return x
        after = tuple(missing if i == dim else 0 for i in range(x.type.rank))
        return self.add(Pad(x, before=(0,) * x.type.rank, after=after))

    def trimmed(self, x: Value, dim: int, size: DimLike) -> Value:
        """The first `size` elements of `x` in one dimension."""
        if x.type.shape[dim] == size:
            return x
        return self.add(Slice(x, dim=dim, start=0, stop=size))

    def part(self, x: Value, dim: int, axes: Axes, part: DimLike) -> Value:
        """This rank's part of a value that every rank holds whole."""
        ways = self.mesh.ways(axes)
        if ways == 1:
            return x
        x = self.padded(x, dim, part * ways)
        shape = x.type.shape
        cut = (*shape[:dim], ways, part, *shape[dim + 1 :])
        return self.add(Gather(self.add(Reshape(x, shape=cut)), self.rank(axes), dim=dim))
