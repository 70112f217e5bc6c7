"""Communication between the ranks along a mesh axis: the eight collectives, and `rank`.

In the global view (`group_size=0`) shapes are global and a collective changes what the type says
about the mesh: `all_reduce` finishes a `{sum tp}`, `all_gather` takes an `@tp` away. In the local
view `group_size` is the number of ranks in the group, types are one rank's and plain. `axis` is one
mesh axis or several joined by dots (`cp.tp`), slowest first as in types. Names and meaning follow
MPI and NCCL; where those leave the result on other ranks than the root undefined, it is zero here,
so that the type of such a result is again a partial sum.
"""

from __future__ import annotations

import re
from functools import reduce as fold
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Module, Op
from ..ir.declare import Operand, operation, operation_base
from ..ir.dims import DimLike, exact_divide
from ..ir.types import Axes, TensorType
from .shapes import position

ReduceKind: TypeAlias = Literal["sum", "max", "min", "prod"]
Array: TypeAlias = Any  # a numpy array

_AXES = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
REDUCTIONS: dict[str, Any] = {  # how two operands are combined
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def mesh_axes(op: str, text: str) -> Axes:
    """The mesh axes that an attribute such as `cp.tp` names, slowest first."""
    if not _AXES.fullmatch(text):
        raise Error(f"{op}: {text!r} is not a mesh axis; write one such as tp, or cp.tp")
    return tuple(text.split("."))


def check_group_size(op: Op, module: Module, axes: Axes, written: int | None) -> None:
    """The axes are those of the mesh, and the group size of a collective fits the view and mesh."""
    group_size = module.mesh.group_size(axes)
    if not module.local and written:
        raise Error(
            f"{op.opname}: group_size={written} is for the local view, and this module is global; "
            "leave it out"
        )
    if module.local and written not in (None, group_size):
        raise Error(
            f"{op.opname} has group_size={written}, but the mesh ({module.mesh}) has "
            f"{group_size} ranks over {'.'.join(axes)}"
        )


class OverAxes(Op):
    """Base of the operations over mesh axes."""

    __slots__ = ()
    records = True
    axis: str

    @property
    def axes(self) -> Axes:
        """The mesh axes, slowest first."""
        return mesh_axes(self.opname, self.axis)


class Collective(OverAxes):
    """Base of the operations that depend on the rank. `combine` is the meaning."""

    __slots__ = ()
    alike: ClassVar[bool] = False  # whether every rank of a group gets the same
    group_size: int  # 0 in the global view; `rank` has none

    @property
    def stated_group_size(self) -> int | None:
        """The ranks in a group: 0 in the global view, None for `rank`."""
        return getattr(self, "group_size", None)

    def verify(self, module: Module) -> None:
        """The axes are those of the mesh; in the local view `group_size` agrees with it."""
        check_group_size(self, module, self.axes, self.stated_group_size)

    def combine(self, shards: list[Array]) -> list[Array]:
        """The results of all ranks of one group, in order, from their operands in order."""
        raise NotImplementedError(f"{self.opname} declares no meaning")

    def whole(self, value: Array) -> Array:
        """The meaning in the global view, where a value is a global tensor."""
        return value


@operation_base
class Exchange(Collective):
    """Base of the collectives: one operand, of the same type on every rank.

    `gathers` names the attribute with the dimension along which the operands of all ranks are
    joined, `scatters` that of which each rank keeps its shard. `root_sends`: only the operand of
    rank `root` counts; `root_receives`: the results of the other ranks are zeros.
    """

    __slots__ = ()
    gathers: ClassVar[str] = ""
    scatters: ClassVar[str] = ""
    root_sends: ClassVar[bool] = False
    root_receives: ClassVar[bool] = False
    x: Operand
    axis: str

    def infer(self) -> TensorType:
        x, axes = self.x.type, self.axes
        if self.group_size < 0:
            raise Error(f"{self.opname}: group_size cannot be negative")
        if self.group_size and x.sharded:
            raise Error(
                f"{self.opname}: group_size={self.group_size} is for the local view, "
                f"but the operand is {x}; leave group_size out"
            )
        root: int = getattr(self, "root", 0)
        if root < 0 or (self.group_size and root >= self.group_size):
            raise Error(f"{self.opname}: there is no rank {root} in a group of {self.group_size}")
        return self._local_type(x) if self.group_size else self._global_type(x, axes)

    def verify(self, module: Module) -> None:
        """In the local view too the collective converts what the ranks have of a global value."""
        Collective.verify(self, module)
        if self.group_size > 1:
            self._global_type(self.x.type.global_type, self.axes)
            self._check_completes(self.attributes.get("op"))

    def refusal(self) -> Error | None:
        try:
            self._global_type(self.x.type.global_type, self.axes)
        except Error as error:
            return error
        return None

    def _check_completes(self, kind: str | None) -> None:
        producer = self.x.producer
        needed = producer.per_shard if producer is not None else ""
        varying = {*self.axes} & {*self.x.type.global_type.varying}
        if kind and varying and needed not in ("", "any", kind):
            raise Error(
                f"{self.opname} takes the {kind} of what each rank of {self.axis} has of its own "
                f"shard by {producer.opname if producer else ''}, which only op={needed} completes"
            )

    def _local_type(self, x: TensorType) -> TensorType:
        """One rank's result type from its operand's."""
        if self.group_size == 1:
            return x
        gathered, scattered = self._dims(x)
        shape = x.shape
        if scattered is not None:
            shape = _put(shape, scattered, self._shard_size(shape[scattered], scattered))
        if gathered is not None:
            shape = _put(shape, gathered, shape[gathered] * self.group_size)
        try:
            of = self._global_type(x.global_type, self.axes)
        except Error:  # `verify` raises: the trace of one rank knows nothing of others
            of = TensorType(x.dtype, shape, varying=tuple(x.global_type.spread))
        # what is not sharded any more keeps the padding of its shards
        sizes = zip(shape, of.shape, of.axes, strict=True)
        whole = tuple([size if axes else local for local, size, axes in sizes])
        return TensorType(x.dtype, shape).part_of(of.replace(shape=whole))

    def _global_type(self, x: TensorType, axes: Axes) -> TensorType:
        """The result type in the global view, also of values of the local view."""
        gathered, scattered = self._dims(x)
        kind = self.attributes.get("op")
        if gathered is not None and scattered is not None and {*axes} <= {*x.varying}:
            return x  # every rank gets other blocks
        if gathered is not None and gathered == scattered:
            raise Error(
                f"{self.opname}: split and concat are both dimension {gathered}; exchanging "
                "blocks of one dimension has a meaning in the local view only, for values that "
                f"vary over {'.'.join(axes)}"
            )
        if kind is not None:
            x = self._finished(x, axes, kind)
        elif gathered is None:
            x = self._replicated(x, axes)
        if gathered is not None:
            x = self._gathered(x, axes, gathered)
        if scattered is not None:
            x = x.replace(axes=_put(x.axes, scattered, x.axes[scattered] + axes))
        return x.replace(partial=(*x.partial, *axes)) if self.root_receives else x

    def _dims(self, x: TensorType) -> list[int | None]:
        """The dimensions that are gathered and scattered, from the front."""
        names = (self.gathers, self.scatters)
        return [position(self.opname, getattr(self, n), x.ndim) if n else None for n in names]

    def _finished(self, x: TensorType, axes: Axes, kind: str) -> TensorType:
        """`x` without the partial sum over `axes`, which must be there.

        In the local view values that vary over the axes may be combined as well.
        """
        over = ".".join(axes)
        if self.group_size:
            return self._combined(x, axes, kind)
        if kind != "sum":
            raise Error(
                f"{self.opname} over {over}: the global view has partial sums only, "
                f"so op is sum and not {kind}"
            )
        if not set(axes) <= set(x.partial):
            raise Error(
                f"{self.opname} over {over}: the operand is {x}, which is not a partial sum over it"
            )
        return x.replace(partial=tuple(a for a in x.partial if a not in axes))

    def _combined(self, x: TensorType, axes: Axes, kind: str) -> TensorType:
        """The global type of local values that are combined over the ranks of `axes`."""
        over = set(axes)
        wrong = [axis for axes in x.axes for axis in axes if axis in over]
        if wrong:
            raise Error(
                f"{self.opname} takes the {kind} of different shards, those of the ranks of "
                f"{wrong[0]}; put an all_gather before it"
            )
        if kind != "sum" and over & set(x.partial):
            raise Error(
                f"{self.opname} takes the {kind} of a partial sum over {'.'.join(axes)}: only "
                "op=sum completes it"
            )
        same = sorted(over - {*x.partial, *x.varying})
        if same and kind in ("sum", "prod"):
            outcome = f"{self.group_size} times the value" if kind == "sum" else "a power of it"
            raise Error(
                f"{self.opname} reduces a value that is the same on all ranks of {same[0]} "
                f"already; that makes {outcome}: leave it out"
            )
        return _without(x, over)

    def _gathered(self, x: TensorType, axes: Axes, at: int) -> TensorType:
        """`x` with dimension `at` replicated over `axes`, which must be its innermost axes.

        The joined values of ranks that vary over the axes are the same on all of them.
        """
        if set(axes) <= set(x.varying) or (self.group_size and not set(axes) & set(x.spread)):
            return _without(x, set(axes))
        if set(axes) & set(x.partial):
            raise Error(
                f"{self.opname} over {'.'.join(axes)}: the operand is a partial sum, {x}, which "
                "only a reduction completes"
            )
        if x.axes[at][-len(axes) :] != axes:
            raise Error(
                f"{self.opname} over {'.'.join(axes)}: dimension {at} of {x} is not sharded over "
                "it" + (", or not innermost" if set(axes) & set(x.axes[at]) else "")
            )
        return x.replace(axes=_put(x.axes, at, x.axes[at][: -len(axes)]))

    def _replicated(self, x: TensorType, axes: Axes) -> TensorType:
        """`x` as the ranks along `axes` get it from one of them, which must have all of it."""
        if set(axes) & {*x.partial, *(axis for group in x.axes for axis in group)}:
            raise Error(
                f"{self.opname} over {'.'.join(axes)}: the operand is {x}, but it must be "
                "replicated on the root; put an all_gather or all_reduce before it"
            )
        return _without(x, set(axes))

    def _shard_size(self, size: DimLike, dim: int) -> DimLike:
        """One rank's shard of a scattered dimension."""
        part = exact_divide(size, self.group_size)
        if part is None:
            raise Error(
                f"{self.opname} scatters dimension {dim}, which is {size}, "
                f"in {self.group_size} equal shards; pad it first"
            )
        return part


@operation("all_reduce")
class AllReduce(Exchange):
    """The operands of all ranks combined elementwise, on every rank.

    Global view: `{sum tp}` -> complete, same shape; an operand that is no partial sum over the axis
    is an Error. Local view: same shape, also with max, min and prod.
    """

    op: ReduceKind = "sum"
    group_size: int = 0
    alike: ClassVar = True

    def combine(self, shards: list[Array]) -> list[Array]:
        return [fold(REDUCTIONS[self.op], shards)] * len(shards)


@operation("all_gather", moves_data=True)
class AllGather(Exchange):
    """The operands of all ranks joined along `dim`, on every rank.

    Global view: `n@tp` -> `n`; the axis must be the innermost axis of that dimension. Local view:
    n -> group_size*n; padding of the shards stays in the result.
    """

    dim: int
    group_size: int = 0
    gathers: ClassVar = "dim"
    alike: ClassVar = True

    def combine(self, shards: list[Array]) -> list[Array]:
        return [np.concatenate(shards, axis=self.dim)] * len(shards)


@operation("reduce_scatter")
class ReduceScatter(Exchange):
    """The operands combined elementwise; each rank keeps its shard along `dim`.

    Global view: `n` of a `{sum tp}` -> `n@tp`, complete. Local view: n -> n/group_size, which
    must divide evenly.
    """

    dim: int
    op: ReduceKind = "sum"
    group_size: int = 0
    scatters: ClassVar = "dim"

    def combine(self, shards: list[Array]) -> list[Array]:
        return np.split(fold(REDUCTIONS[self.op], shards), len(shards), axis=self.dim)


@operation("all_to_all", moves_data=True)
class AllToAll(Exchange):
    """Every rank sends block j along `split` to rank j and joins what it receives along `concat`.

    Global view: `concat` is `n@tp` and becomes replicated, `split` sharded. Local view:
    concat -> group_size*concat, split -> split/group_size; with split equal to concat the ranks
    exchange blocks, which the global view cannot express.
    """

    split: int
    concat: int
    group_size: int = 0
    gathers: ClassVar = "concat"
    scatters: ClassVar = "split"

    def combine(self, shards: list[Array]) -> list[Array]:
        parts = [np.split(shard, len(shards), axis=self.split) for shard in shards]
        return [np.concatenate(arrived, axis=self.concat) for arrived in zip(*parts, strict=True)]


@operation("broadcast", moves_data=True)
class Broadcast(Exchange):
    """The operand of rank `root` of the group, on every rank. Same shape.

    Global view: the operand is neither sharded nor partial over the axis.
    """

    root: int = 0
    group_size: int = 0
    root_sends: ClassVar = True
    alike: ClassVar = True

    def combine(self, shards: list[Array]) -> list[Array]:
        return [shards[self.root]] * len(shards)


@operation("reduce")
class Reduce(Exchange):
    """The operands combined elementwise on rank `root`; zeros on the others. Same shape.

    Global view: `{sum tp}` stays `{sum tp}`: the ranks together still hold the sum.
    """

    root: int = 0
    op: ReduceKind = "sum"
    group_size: int = 0
    root_receives: ClassVar = True

    def combine(self, shards: list[Array]) -> list[Array]:
        return _only(self.root, fold(REDUCTIONS[self.op], shards), len(shards))


@operation("collective_gather", moves_data=True)
class CollectiveGather(Exchange):
    """The operands joined along `dim` on rank `root`; zeros of that shape on the others.

    Global view: `n@tp` -> `n`, partial over tp. Local view: n -> group_size*n.
    """

    dim: int
    root: int = 0
    group_size: int = 0
    gathers: ClassVar = "dim"
    root_receives: ClassVar = True

    def combine(self, shards: list[Array]) -> list[Array]:
        return _only(self.root, np.concatenate(shards, axis=self.dim), len(shards))


@operation("collective_scatter", moves_data=True)
class CollectiveScatter(Exchange):
    """Shard i along `dim` of the operand of rank `root`, on rank i.

    Global view: `n` -> `n@tp`; the operand is neither sharded nor partial over the axis.
    Local view: n -> n/group_size, where group_size divides n.
    """

    dim: int
    root: int = 0
    group_size: int = 0
    scatters: ClassVar = "dim"
    root_sends: ClassVar = True

    def combine(self, shards: list[Array]) -> list[Array]:
        return np.split(shards[self.root], len(shards), axis=self.dim)


@operation("rank", cheap=True)
class Rank(Collective):
    """This rank's position along the axis, from 0: i32[]. Only in the local view."""

    axis: str

    def infer(self) -> TensorType:
        return TensorType("i32", (), of=TensorType("i32", (), varying=self.axes))

    def verify(self, module: Module) -> None:
        """The axis is one of the mesh, and the module is in the local view."""
        module.mesh.group_size(self.axes)
        if not module.local:
            raise Error("rank differs from rank to rank, so it is for the local view only")

    def combine(self, shards: list[Array]) -> list[Array]:
        return [np.int32(i) for i in range(len(shards))]


def _without(x: TensorType, axes: set[str]) -> TensorType:
    """The type where no sum over `axes` is left, and nothing varies over them."""
    partial, varying = (tuple(a for a in own if a not in axes) for own in (x.partial, x.varying))
    return x.replace(partial=partial, varying=varying)


def _only(root: int, value: Array, group_size: int) -> list[Array]:
    return [value if i == root else np.zeros_like(value) for i in range(group_size)]


def _put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])
