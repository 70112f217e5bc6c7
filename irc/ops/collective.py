"""Communication between the ranks along a mesh axis: the eight collectives, and `rank`.

In the global view (`ways=0`) shapes are whole and a collective changes what the type says about the
mesh: `all_reduce` finishes a `{sum tp}`, `all_gather` takes an `@tp` away. In the local view `ways`
is the number of ranks in the group, types are one rank's and plain. `axis` is one mesh axis or
several joined by dots (`cp.tp`), slowest first as in types. Names and meaning follow MPI and NCCL;
where those leave the result on other ranks than the root undefined, it is zero here, so that the
type of such a result is again a pending sum.
"""

from __future__ import annotations

import re
from functools import reduce as fold
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from ..core import Module, Op
from ..declare import Operand, operation
from ..dims import DimLike, Shape, exact_divide
from ..errors import Error
from ..types import Axes, TensorType
from .shapes import position

ReduceKind: TypeAlias = Literal["sum", "max", "min", "prod"]
Array: TypeAlias = Any  # a numpy array

_AXES = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
REDUCTIONS: dict[str, Any] = {  # how two parts are combined
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def mesh_axes(op: str, text: str) -> Axes:
    """The mesh axes that an attribute such as `cp.tp` names, slowest first."""
    if not _AXES.fullmatch(text):
        raise Error(f"{op}: {text!r} is no mesh axis; write one such as tp, or cp.tp")
    return tuple(text.split("."))


def check_ways(op: Op, module: Module, axes: Axes, found: int | None) -> None:
    """The axes are those of the mesh, and the ways a collective says fit the view and the mesh."""
    ways = module.mesh.ways(axes)
    if not module.local and found:
        raise Error(
            f"{op.opname}: ways={found} is for the local view, and this module is global; "
            "leave it out"
        )
    if module.local and found not in (None, ways):
        raise Error(
            f"{op.opname} has ways={found}, but the mesh ({module.mesh}) has "
            f"{ways} ranks over {'.'.join(axes)}"
        )


class Collective(Op):
    """Base of what needs the other ranks of a group. `combine` is the meaning."""

    __slots__ = ()
    alike: ClassVar[bool] = False  # whether every rank of a group gets the same
    axis: str

    @property
    def axes(self) -> Axes:
        """The mesh axes, slowest first."""
        return mesh_axes(self.opname, self.axis)

    @property
    def group_size(self) -> int | None:
        """The ranks in a group: 0 in the global view, None where the operation does not say."""
        return getattr(self, "ways", None)

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh, and `ways` is for the local view, where it must agree."""
        check_ways(self, module, self.axes, self.group_size)

    def combine(self, shards: list[Array]) -> list[Array]:
        """The results of all ranks of one group, in order, from their operands in order."""
        raise NotImplementedError(f"{self.opname} does not say what it means")

    def whole(self, value: Array) -> Array:
        """The meaning in the global view, where a value is what the ranks hold together."""
        return value


class Exchange(Collective):
    """Base of the collectives: one operand, the same on every rank but for its values."""

    __slots__ = ()
    x: Operand
    ways: int

    def infer(self) -> TensorType:
        x, axes = self.x.type, self.axes
        if self.ways < 0:
            raise Error(f"{self.opname}: ways cannot be negative")
        if self.ways and x.sharded:
            raise Error(
                f"{self.opname}: ways={self.ways} is for the local view, "
                f"but the operand is {x}; leave ways out"
            )
        root: int = getattr(self, "root", 0)
        if root < 0 or (self.ways and root >= self.ways):
            raise Error(f"{self.opname}: there is no rank {root} in a group of {self.ways}")
        return (
            x.replace(shape=self.local_shape(x.shape)) if self.ways else self.global_type(x, axes)
        )

    def local_shape(self, shape: Shape) -> Shape:
        """One rank's result shape from its operand shape."""
        return shape

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        """The result type in the global view."""
        raise NotImplementedError(f"{self.opname} does not type its result")

    def finished(self, x: TensorType, axes: Axes, kind: str) -> TensorType:
        """`x` without the pending sum over `axes`, which must be there."""
        over = ".".join(axes)
        if kind != "sum":
            raise Error(
                f"{self.opname} over {over}: in the global view what is pending is a sum, "
                f"so op is sum and not {kind}"
            )
        if not set(axes) <= set(x.partial):
            raise Error(
                f"{self.opname} over {over}: the operand is {x}, which is not a partial sum over it"
            )
        return x.replace(partial=tuple(a for a in x.partial if a not in axes))

    def gathered(self, x: TensorType, axes: Axes, dim: int) -> TensorType:
        """`x` with dimension `dim` whole over `axes`, which must be its innermost split."""
        at = position(self.opname, dim, x.rank)
        if x.axes[at][-len(axes) :] != axes:
            raise Error(
                f"{self.opname} over {'.'.join(axes)}: dimension {dim} of {x} is not split over it"
                + (", or not innermost" if set(axes) & set(x.axes[at]) else "")
            )
        return x.replace(axes=_put(x.axes, at, x.axes[at][: -len(axes)]))

    def scattered(self, x: TensorType, axes: Axes, dim: int) -> TensorType:
        """`x` with dimension `dim` split over `axes` as well."""
        at = position(self.opname, dim, x.rank)
        return x.replace(axes=_put(x.axes, at, x.axes[at] + axes))

    def replicated(self, x: TensorType, axes: Axes) -> TensorType:
        """`x`, which every rank along `axes` must hold whole."""
        if set(axes) & {*x.partial, *(axis for group in x.axes for axis in group)}:
            raise Error(
                f"{self.opname} over {'.'.join(axes)}: the operand is {x}, but it must be whole on "
                "the root; put an all_gather or all_reduce before it"
            )
        return x

    def grown(self, shape: Shape, dim: int) -> Shape:
        """`shape` with the parts of all ranks along `dim`."""
        at = position(self.opname, dim, len(shape))
        return _put(shape, at, shape[at] * self.ways)

    def cut(self, shape: Shape, dim: int) -> Shape:
        """`shape` with one rank's part of `dim`."""
        at = position(self.opname, dim, len(shape))
        part: DimLike | None = exact_divide(shape[at], self.ways)
        if part is None:
            raise Error(
                f"{self.opname} cuts dimension {dim}, which is {shape[at]}, "
                f"into {self.ways} equal parts; pad it before"
            )
        return _put(shape, at, part)


@operation("all_reduce")
class AllReduce(Exchange):
    """The operands of all ranks combined elementwise, on every rank.

    Global view: `{sum tp}` -> complete, same shape; an operand that is no partial sum over the axis
    is an Error. Local view: same shape, also with max, min and prod.
    """

    x: Operand
    axis: str
    op: ReduceKind = "sum"
    ways: int = 0
    alike: ClassVar = True

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        return self.finished(x, axes, self.op)

    def combine(self, shards: list[Array]) -> list[Array]:
        return [fold(REDUCTIONS[self.op], shards)] * len(shards)


@operation("all_gather")
class AllGather(Exchange):
    """The operands of all ranks joined along `dim`, on every rank.

    Global view: `n@tp` -> `n`; the axis must be the innermost split of that dimension. Local view:
    n -> ways*n; parts that were padded stay so.
    """

    x: Operand
    axis: str
    dim: int
    ways: int = 0
    alike: ClassVar = True

    def local_shape(self, shape: Shape) -> Shape:
        return self.grown(shape, self.dim)

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        return self.gathered(x, axes, self.dim)

    def combine(self, shards: list[Array]) -> list[Array]:
        return [np.concatenate(shards, axis=self.dim)] * len(shards)


@operation("reduce_scatter")
class ReduceScatter(Exchange):
    """The operands combined elementwise; each rank keeps its part along `dim`.

    Global view: `n` of a `{sum tp}` -> `n@tp`, complete. Local view: n -> n/ways, which must be
    whole (an Error says to pad).
    """

    x: Operand
    axis: str
    dim: int
    op: ReduceKind = "sum"
    ways: int = 0

    def local_shape(self, shape: Shape) -> Shape:
        return self.cut(shape, self.dim)

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        return self.scattered(self.finished(x, axes, self.op), axes, self.dim)

    def combine(self, shards: list[Array]) -> list[Array]:
        return np.split(fold(REDUCTIONS[self.op], shards), len(shards), axis=self.dim)


@operation("all_to_all")
class AllToAll(Exchange):
    """Every rank sends part j along `split` to rank j and joins what arrives along `concat`.

    Global view: `concat` is `n@tp` and becomes whole, `split` becomes split. Local view:
    concat -> ways*concat, split -> split/ways; with split equal to concat the ranks exchange
    blocks, which the global view cannot express.
    """

    x: Operand
    axis: str
    split: int
    concat: int
    ways: int = 0

    def local_shape(self, shape: Shape) -> Shape:
        return self.grown(self.cut(shape, self.split), self.concat)

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        if position(self.opname, self.split, x.rank) == position(self.opname, self.concat, x.rank):
            raise Error(
                f"{self.opname}: split and concat are both dimension {self.split}; exchanging "
                "blocks of one dimension has a meaning in the local view only"
            )
        return self.scattered(self.gathered(x, axes, self.concat), axes, self.split)

    def combine(self, shards: list[Array]) -> list[Array]:
        parts = [np.split(shard, len(shards), axis=self.split) for shard in shards]
        return [np.concatenate(arrived, axis=self.concat) for arrived in zip(*parts, strict=True)]


@operation("broadcast")
class Broadcast(Exchange):
    """The operand of rank `root` of the group, on every rank. Same shape.

    Global view: the operand is neither split nor pending over the axis.
    """

    x: Operand
    axis: str
    root: int = 0
    ways: int = 0
    alike: ClassVar = True

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        return self.replicated(x, axes)

    def combine(self, shards: list[Array]) -> list[Array]:
        return [shards[self.root]] * len(shards)


@operation("reduce")
class Reduce(Exchange):
    """The operands combined elementwise on rank `root`; zeros on the others. Same shape.

    Global view: `{sum tp}` stays `{sum tp}`: the ranks together still hold the sum.
    """

    x: Operand
    axis: str
    root: int = 0
    op: ReduceKind = "sum"
    ways: int = 0

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        self.finished(x, axes, self.op)
        return x

    def combine(self, shards: list[Array]) -> list[Array]:
        return _only(self.root, fold(REDUCTIONS[self.op], shards), len(shards))


@operation("collective_gather")
class CollectiveGather(Exchange):
    """The operands joined along `dim` on rank `root`; zeros of that shape on the others.

    Global view: `n@tp` -> `n`, pending over tp. Local view: n -> ways*n.
    """

    x: Operand
    axis: str
    dim: int
    root: int = 0
    ways: int = 0

    def local_shape(self, shape: Shape) -> Shape:
        return self.grown(shape, self.dim)

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        joined = self.gathered(x, axes, self.dim)
        return joined.replace(partial=(*joined.partial, *axes))

    def combine(self, shards: list[Array]) -> list[Array]:
        return _only(self.root, np.concatenate(shards, axis=self.dim), len(shards))


@operation("collective_scatter")
class CollectiveScatter(Exchange):
    """Part i along `dim` of the operand of rank `root`, on rank i.

    Global view: `n` -> `n@tp`; the operand is neither split nor pending over the axis. Local view:
    n -> n/ways, which must be whole.
    """

    x: Operand
    axis: str
    dim: int
    root: int = 0
    ways: int = 0

    def local_shape(self, shape: Shape) -> Shape:
        return self.cut(shape, self.dim)

    def global_type(self, x: TensorType, axes: Axes) -> TensorType:
        return self.scattered(self.replicated(x, axes), axes, self.dim)

    def combine(self, shards: list[Array]) -> list[Array]:
        return np.split(shards[self.root], len(shards), axis=self.dim)


@operation("rank")
class Rank(Collective):
    """This rank's position along the axis, from 0: i32[]. Only in the local view."""

    axis: str

    def infer(self) -> TensorType:
        _ = self.axes  # an Error where it is no axis
        return TensorType("i32", ())

    def verify(self, module: Module) -> None:
        """The axis is one of the mesh, and the module is in the local view."""
        module.mesh.ways(self.axes)
        if not module.local:
            raise Error("rank differs from rank to rank, so it is for the local view only")

    def combine(self, shards: list[Array]) -> list[Array]:
        return [np.int32(i) for i in range(len(shards))]


def _only(root: int, value: Array, ways: int) -> list[Array]:
    return [value if i == root else np.zeros_like(value) for i in range(ways)]


def _put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])
