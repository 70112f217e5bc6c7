"""Builds local functions: local values of global ones, ranks, offsets, masks."""

from __future__ import annotations

from collections.abc import Callable, Set

from irc import ops
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dims import DimLike
from irc.ir.dtypes import is_float
from irc.ir.types import Axes, TensorType
from irc.source import Loc

from .padding import Padding


class Builder:
    """Appends local operations to a function. `values` maps global values to local ones.

    `types` has the global types of the weights; `zeros`, of tables that got rows of zeros behind
    those of each rank, the number of the first. `padded` are the global arguments whose padding is
    zeros.
    """

    def __init__(
        self,
        module: Module,
        function: Function,
        values: dict[Value, Value],
        types: dict[Weight, TensorType],
        localized: dict[Function, Function],
        zeros: dict[Value, int] | None = None,
        padded: Set[Value] = frozenset(),
    ) -> None:
        self.module, self.mesh, self.function = module, module.mesh, function
        self.values, self.types, self.localized = values, types, localized
        self.zeros: dict[Value, int] = zeros or {}
        self.loc: Loc | None = None
        self.kept: set[Value] = set()  # results shared by several global values
        self.padding = Padding(self.type, padded)
        self._made_once: dict[tuple[object, ...], Value] = {}

    def local(self, value: Value) -> Value:
        """The local value of a global one; a weight is its own."""
        return self.values.get(value, value)

    def type(self, value: Value) -> TensorType:
        """The global type of a global value."""
        return self.types[value] if isinstance(value, Weight) else value.type

    def add(self, op: Op) -> Value:
        """Append an expression whose root has one result, which is returned."""
        return self.add_all(op)[0]

    def add_all(self, op: Op) -> tuple[Value, ...]:
        """Append an expression, operands first, at the location of the operation being localized.

        Returns the results of the root.
        """
        for value in op.operands:
            if value.producer is not None and value.producer.parent is None:
                self.add_all(value.producer)
        op.loc = self.loc
        self.function.append(op)
        return op.results

    def _once(self, key: tuple[object, ...], make: Callable[[], Op], name: str = "") -> Value:
        """A value made once per function, which several global values may share."""
        value = self._made_once.get(key)
        if value is None:
            value = self._made_once[key] = self.add(make())
            value.name = name or None
            self.kept.add(value)
        return value

    def wide(self, axes: Axes) -> Axes:
        """The axes that have several ranks."""
        return tuple(axis for axis in axes if self.mesh.size(axis) > 1)

    def own(self, value: Value) -> Value:
        """The value as each rank's own, rather than part of a global one."""
        spread = value.type.global_type.spread
        varying = TensorType(value.type.dtype, value.type.shape, varying=spread)
        value.type = value.type.part_of(varying)
        return value

    def shards(self, value: Value, dim: int, axes: Axes) -> Value:
        """What each rank has of its own as shards of one global value along a dimension."""
        type = value.type
        shape = list(type.shape)
        shape[dim] *= self.mesh.group_size(axes)
        over = tuple(axes if i == dim else () for i in range(type.ndim))
        rest = tuple(axis for axis in type.global_type.varying if axis not in axes)
        value.type = type.part_of(TensorType(type.dtype, tuple(shape), over, varying=rest))
        return value

    def rank(self, axes: Axes, dtype: str = "i32") -> Value:
        """This rank's position along the axes, made once per function."""
        axes = self.wide(axes)
        if dtype != "i32":
            return self._once(("rank", axes, dtype), lambda: ops.Cast(self.rank(axes), dtype=dtype))
        name = f"rank_{'_'.join(axes)}"
        return self._once(("rank", axes), lambda: ops.Rank(axis=".".join(axes)), name)

    def constant(self, value: float, dtype: str) -> Value:
        """A scalar, made once per function."""
        number = float(value) if is_float(dtype) else value
        return self._once(
            ("constant", value, dtype), lambda: ops.Constant(values=(number,), dtype=dtype)
        )

    def size(self, size: DimLike) -> Value:
        """A size as i32[], also where it is known at run time only."""
        if isinstance(size, int):
            return self.constant(size, "i32")
        ones = ops.Full(value=1, shape=(size,), dtype="i32")
        return self.add(ops.ReduceSum(ones, dims=(0,)))

    def start(self, axes: Axes, part: DimLike, dtype: str = "i32") -> Value:
        """The offset of this rank's shard, of shards of size `part`; made once per function."""
        if not isinstance(part, int):
            raise TypeError("shards of symbolic size are even; nothing needs their offset")
        return self._once(
            ("start", axes, part, dtype),
            lambda: ops.Mul(self.rank(axes, dtype), self.constant(part, dtype)),
            f"start_{'_'.join(axes)}",
        )

    def masked(self, x: Value, dim: int, size: int, axes: Axes, fill: float = 0) -> Value:
        """`x` with `fill` in the padding of its shard of a dimension of `size`."""
        part = x.type.shape[dim]
        mask = self.real(axes, size, part)
        if x.type.ndim > 1:
            shape = tuple(part if i == dim else 1 for i in range(x.type.ndim))
            mask = self.add(ops.Reshape(mask, shape=shape))
        return self.add(ops.Where(mask, x, self.constant(fill, x.type.dtype)))

    def real(self, axes: Axes, size: int, part: DimLike) -> Value:
        """bool [part]: which elements of a shard are no padding; made once per function."""
        return self._once(
            ("real", axes, size, part),
            lambda: ops.Lt(
                ops.Iota(size=part), ops.Sub(self.constant(size, "i32"), self.start(axes, part))
            ),
            f"real_{'_'.join(axes)}",
        )

    def padded(self, x: Value, dim: int, size: DimLike, fill: float = 0) -> Value:
        """`x` padded with `fill` to `size` in one dimension."""
        missing = size - x.type.shape[dim]
        if missing == 0:
            return x
        after = tuple(missing if i == dim else 0 for i in range(x.type.ndim))
        return self.add(ops.Pad(x, before=(0,) * x.type.ndim, after=after, value=fill))

    def trimmed(self, x: Value, dim: int, size: DimLike) -> Value:
        """The first `size` elements of `x` in one dimension."""
        if x.type.shape[dim] == size:
            return x
        return self.add(ops.Slice(x, dim=dim, start=0, stop=size))

    def part(self, x: Value, dim: int, axes: Axes, part: DimLike) -> Value:
        """The shard of this rank of a replicated value."""
        group_size = self.mesh.group_size(axes)
        if group_size == 1:
            return x
        x = self.padded(x, dim, part * group_size)
        shape = x.type.shape
        cut = ops.Reshape(x, shape=(*shape[:dim], group_size, part, *shape[dim + 1 :]))
        parts = self.own(cut.result) if x.type.global_type.axes[dim] else cut.result
        return self.add(ops.Gather(parts, self.rank(axes), dim=dim))
