"""The schemes of lookups in sharded tables, and the lookups that may have one.

| scheme | table | collectives |
|---|---|---|
| R | replicated | none |
| RA, RS, RSD | rows | all_reduce; reduce_scatter; ids, then reduce_scatter |
| CA, CS, CD | columns | all_gather; all_to_all; ids, then all_to_all |
| KA, KS, KD | cyclic | all_gather of rows; all_to_all; all_to_all of ids and of rows |

The last letter says which rows a rank gets: A all of them, S those of its shard of the ids, D those
of its own ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from irc import ops
from irc.ir.core import Op, Value, Weight
from irc.ir.types import Axes
from irc.ops.collective import Exchange

from ..shared.edit import only_user

Wanted: TypeAlias = Literal["replicated", "scattered", "sharded"]
Layout: TypeAlias = Literal["replicated", "rows", "columns", "cyclic"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
NOT_SHARDED = "its table is not sharded"


@dataclass(frozen=True)
class Scheme:
    """A layout of a table [V, D], and how its rows get to the ranks that need them.

    `ids` is the collective of ids in front of the lookup, `rows` that of rows behind it; each is
    empty where there is none.
    """

    name: str
    layout: Layout
    wanted: Wanted
    ids: str = ""
    rows: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether rows keep all their bits, because nothing is added up."""
        return self.rows not in ("all_reduce", "reduce_scatter")


_ALL = (
    Scheme("R", "replicated", "replicated"),
    Scheme("R", "replicated", "scattered"),
    Scheme("R", "replicated", "sharded"),
    Scheme("RA", "rows", "replicated", rows="all_reduce"),
    Scheme("RS", "rows", "scattered", rows="reduce_scatter"),
    Scheme("RSD", "rows", "sharded", ids="all_gather", rows="reduce_scatter"),
    Scheme("CA", "columns", "replicated", rows="all_gather"),
    Scheme("CS", "columns", "scattered", rows="all_to_all"),
    Scheme("CD", "columns", "sharded", ids="all_gather", rows="all_to_all"),
    Scheme("KA", "cyclic", "replicated", rows="all_gather"),
    Scheme("KS", "cyclic", "scattered", rows="all_to_all"),
    Scheme("KD", "cyclic", "sharded", ids="all_to_all", rows="all_to_all"),
)
SCHEMES = {(scheme.layout, scheme.wanted): scheme for scheme in _ALL}
NAMES = list(dict.fromkeys(scheme.name for scheme in _ALL))
LAYOUT_OF: dict[str, Layout] = {scheme.name.lower(): scheme.layout for scheme in _ALL}
LAYOUT_OF.update(zip(LAYOUTS, LAYOUTS, strict=True))


@dataclass(frozen=True)
class Site:
    """One lookup whose table is sharded over `axes`, or will be.

    The result is needed `replicated`; `scattered`, sharded in `dim` though the ids are replicated;
    or `sharded` in `dim` as the ids are, which are `gathered` first where the table is sharded now.
    `chain` are additive operations on the way to `end`, the collective that completes the result.
    Where they move rows, the lookup itself is needed `replicated`, and what `end` scatters is
    sliced.
    """

    op: ops.Embedding
    table: Weight
    axes: Axes
    wanted: Wanted
    dim: int = 0
    gathered: bool = False
    chain: tuple[Op, ...] = ()
    end: Op | None = None

    @property
    def axis(self) -> str:
        """The axes as collectives have them."""
        return ".".join(self.axes)

    @property
    def layout(self) -> Layout:
        """How the table is sharded now."""
        return layout_of(self.table)

    @property
    def ids(self) -> Value:
        """The ids that a rank has before any are gathered."""
        gather = self.op.ids.producer
        return gather.operands[0] if self.gathered and gather is not None else self.op.ids

    @property
    def need(self) -> str:
        """The rows that the site needs, as a clause."""
        over = f"over {self.axis}"
        if self.wanted == "replicated":
            return f"its result must be replicated {over}"
        if self.wanted == "scattered":
            return (
                f"its ids are replicated and dimension {self.dim} of its result is sharded {over}"
            )
        return f"dimension {self.dim} of its ids is sharded {over}, and of its result as well"


def layout_of(table: Weight) -> Layout:
    """How a table [V, D] is sharded."""
    rows, columns = table.type.axes
    return "rows" if rows else "columns" if columns else "replicated"


def find_site(op: ops.Embedding, axes: Axes | None, other: bool = False) -> Site | str:
    """The site of a lookup, or why it is kept. `axes` are for a replicated table.

    With `other` the table gets another layout, even where its columns are used as they are sharded.
    """
    table = op.table
    assert isinstance(table, Weight)
    rows, columns = table.type.axes
    if rows and columns:
        return "its rows and its columns are sharded"
    if not rows and not columns:
        return _replicated(op, table, axes) if axes else NOT_SHARDED
    over = rows or columns
    walked = _walk_sum(op, rows) if rows else _walk_columns(op, columns)
    if isinstance(walked, str):
        return Site(op, table, columns, "replicated") if other and columns else walked
    chain, end, dim = walked
    if dim is None or any(each.result.type is not op.result.type for each in chain):
        return Site(op, table, over, "replicated", chain=chain, end=end)
    if dim >= op.ids.type.ndim:
        return "its result is sharded in the columns of the table"
    gather = op.ids.producer
    if (
        isinstance(gather, ops.AllGather)
        and gather.axes == over
        and gather.dim % op.ids.type.ndim == dim
        and gather.x.type.axes[dim] == over
    ):
        return Site(op, table, over, "sharded", dim, True, chain, end)
    return Site(op, table, over, "scattered", dim, chain=chain, end=end)


def _replicated(op: ops.Embedding, table: Weight, axes: Axes) -> Site | str:
    """A site whose result is replicated, or sharded as its ids are."""
    for dim, over in enumerate(op.ids.type.axes):
        if over == axes:
            return Site(op, table, axes, "sharded", dim)
        if set(over) & set(axes):
            return f"its ids are {op.ids.type}"
    return Site(op, table, axes, "replicated")


Walk: TypeAlias = tuple[tuple[Op, ...], Op, int | None]


def _walk_sum(op: ops.Embedding, axes: Axes) -> Walk | str:
    """(additive operations, the collective that completes the sum, the dimension it scatters)."""
    chain: list[Op] = []
    value = op.result
    while True:
        user = only_user(value)
        if user is None:
            return "its partial sum is used in several places"
        if isinstance(user, ops.AllReduce) and user.axes == axes:
            return tuple(chain), user, None
        if isinstance(user, ops.ReduceScatter) and user.axes == axes:
            return tuple(chain), user, user.dim % value.type.ndim
        if not _is_additive(user, value, axes):
            return f"its partial sum is an operand of {user.opname}"
        chain.append(user)
        value = user.results[0]


def _walk_columns(op: ops.Embedding, axes: Axes) -> Walk | str:
    """The same for columns, which an all_gather or an all_to_all joins."""
    user, last = only_user(op.result), op.result.type.ndim - 1
    if user is None:
        return "its columns are used in several places"
    if isinstance(user, ops.AllGather) and user.axes == axes and user.dim % (last + 1) == last:
        return (), user, None
    if isinstance(user, ops.AllToAll) and user.axes == axes and user.concat % (last + 1) == last:
        return (), user, user.split % (last + 1)
    return f"{user.opname} takes its columns as they are sharded"


def _is_additive(op: Op, value: Value, axes: Axes) -> bool:
    """Whether the sum of an operation's results over the ranks is its result for their sum."""
    if len(op.results) != 1 or isinstance(op, (Exchange, ops.Call)):
        return False
    others = [v for v in op.operands if v is not value]
    waits = set(axes) <= set(op.result.type.partial)
    return waits and not any(set(axes) & set(v.type.partial) for v in others)
