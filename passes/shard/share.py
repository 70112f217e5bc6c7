"""The share of a module's weights that is sharded, and why the rest is replicated."""

from __future__ import annotations

from irc.analysis.units import amount
from irc.ir.core import Module, Weight
from irc.ir.dims import Dim, product
from irc.ir.dtypes import dtype

from .notes import general
from .place import BATCH, only_looked_up, row_axes
from .rows import Row, find_row

_SHOWN = 3  # kinds of replicated weights
_UNNAMED = "no row of the plan names it"


def share_of_weights(
    module: Module, rows: list[Row], origins: dict[str, str], is_default: bool
) -> str:
    """A sentence about a sharded module; "" where its mesh has no axis over which rows shard.

    `is_default`: the rows are those of the default plan.
    """
    planned = row_axes(rows) - {BATCH}
    axes = [axis for axis, size in module.mesh.axes if size > 1 and axis in planned]
    if not axes:
        return ""
    sizes = {name: _bytes(weight) for name, weight in module.weights.items()}
    total, rest = sum(sizes.values()), dict[tuple[str, str], int]()
    for name, weight in module.weights.items():
        if not weight.type.sharded and sizes[name]:
            origin = origins.get(name, name)
            row = find_row(rows, origin, looked_up=only_looked_up(weight))
            key = general(origin), _UNNAMED if row is None else row.source
            rest[key] = rest.get(key, 0) + sizes[name]
    if not total:
        return ""
    says = f"{1 - sum(rest.values()) / total:.1%} of the weights ({amount(total)}) are sharded"
    large = sorted((item for item in rest.items() if item[1] > total / 100), key=_size)[-_SHOWN:]
    shown = [f"{name} ({amount(size)}: {why})" for (name, why), size in large[::-1]]
    if len(rest) > len(large):
        left = amount(sum(rest.values()) - sum(size for _, size in large))
        shown.append(f"the rest ({left})")
    says += f"; replicated: {', '.join(shown)}" if shown else ""
    if large and large[-1][0][1] == _UNNAMED:
        says += f"; --plan FILE shards more, with rows such as {large[-1][0][0]} 0@{axes[-1]}"
        says += ", then megatron" * is_default
    return says


def _size(item: tuple[object, int]) -> int:
    return item[1]


def _bytes(weight: Weight) -> int:
    count = product(weight.type.shape)
    return 0 if isinstance(count, Dim) else dtype(weight.type.dtype).nbytes(count)
