"""Applies the rows of a plan to weights and arguments, and says what is sharded and what is not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from irc.analysis.places import REPLICATED, general, value_name
from irc.analysis.stages import PIPELINE
from irc.analysis.units import amount
from irc.errors import Error, did_you_mean
from irc.ir.core import Function, Module, Value, Weight
from irc.ir.dims import Dim, product
from irc.ir.dtypes import dtype
from irc.ir.mesh import AXES
from irc.ir.types import Axes

from .plan import DEFAULT, Plan, Rest, Row

BATCH = "dp"  # data-parallel replicas


@dataclass(frozen=True)
class Placement:
    """Decided values: all dimensions of `fixed` ones, the first of `batched` ones."""

    fixed: set[Value] = field(default_factory=set[Value])
    batched: set[Value] = field(default_factory=set[Value])

    def free(self, value: Value, dim: int) -> bool:
        """Whether propagation may shard a dimension."""
        return value not in self.fixed and (dim > 0 or value not in self.batched)


def place(plan: Plan) -> Placement:
    """Shard the values that the plan names."""
    placement, module = Placement(), plan.module
    args = [arg for function in module.functions.values() for arg in function.args]
    for value in (*module.weights.values(), *args):
        row = plan.row_of(value)
        if row is not None:
            placement.fixed.add(value)
            _split(plan, value, row)
    if BATCH in module.mesh.names:
        for function in module.functions.values():
            _place_batch(plan, function, placement)
    _check_rows(plan)
    _check_axes(plan)
    return placement


def _check_rows(plan: Plan) -> None:
    """An Error about a row that matches nothing, or names an unknown axis."""
    module = plan.module
    names = [plan.origin(name) for name in module.weights]
    names += [str(arg.name) for function in module.functions.values() for arg in function.args]
    shown = f"they are called {', '.join(names[:3])} and so on"
    for row in plan.rows:
        if row.must_fit and not any(row.fits(name) for name in names):
            raise Error(f"{row.source}: {row} fits no weight and no input of this module; {shown}")
        strange = [axis for axis in row.axes if axis not in (*module.mesh.names, *AXES)]
        if row.must_fit and strange:
            raise Error(
                f"{row.source}: {row} names the axis {strange[0]}, which the mesh ({module.mesh}) "
                f"does not have{did_you_mean(strange[0], module.mesh.names)}"
            )
    _check_entries(plan, names, shown)


def _check_entries(plan: Plan, names: list[str], shown: str) -> None:
    """An Error about a tp_plan without a matching entry; a note about each unmatched entry."""
    source = {row.entry: row.source.rpartition(": ")[0] for row in plan.rows if row.entry}
    used = {row.entry for row in plan.rows if row.entry and any(row.fits(name) for name in names)}
    if source and not used:
        first, path = next(iter(source.items()))
        more = f", nor do its {len(source) - 1} others" if len(source) > 1 else ""
        raise Error(
            f"{path}: the entry {first} of the tp_plan fits no weight of this module{more}; "
            f"{shown}. Correct the entries, or leave it to the default with the plan auto"
        )
    for entry, path in source.items():
        if entry not in used:
            plan.stats.explain(f"{path}: the entry {entry} of the tp_plan fits no weight")


def _place_batch(plan: Plan, function: Function, placement: Placement) -> None:
    """Shard over dp all arguments that begin with the dimension of the first symbolic one."""
    sized = _sized(function)
    for arg in sized:
        row = plan.row_of(arg)
        decided = row is not None and (not row.splits or BATCH in row.axes or arg.type.axes[0])
        if arg.type.shape[0] == sized[0].type.shape[0] and not decided:
            placement.batched.add(arg)
            batch = Row(str(arg.name), ((0, (BATCH,)),), "the batch goes over dp")
            _split(plan, arg, batch)


def _sized(function: Function) -> list[Value]:
    """The arguments that begin with a symbolic dimension."""
    return [arg for arg in function.args if arg.type.ndim and isinstance(arg.type.shape[0], Dim)]


def _check_axes(plan: Plan) -> None:
    """An Error where the plan has an axis of the mesh, but shards nothing over it."""
    module = plan.module
    args = [arg for function in module.functions.values() for arg in function.args]
    values = [*module.weights.values(), *args]
    used = {axis for value in values for axes in value.type.axes for axis in axes}
    for axis, size in module.mesh.axes:
        if size == 1 or axis in used or axis == PIPELINE:
            continue
        if axis == BATCH and not any(_sized(function) for function in module.functions.values()):
            raise Error(_no_batch(module))
        if axis in plan.axes:
            raise Error(_no_weight(plan, axis))
        if axis not in AXES:
            raise Error(
                f"nothing is sharded over the mesh axis {axis}{did_you_mean(axis, AXES)}; write a "
                "plan that names it, or leave it out"
            )
        plan.stats.explain(f"nothing is sharded over {axis}: its {size} ranks do the same")


def _no_batch(module: Module) -> str:
    args = ", ".join(f"%{arg.name}: {arg.type}" for arg in module.main.args[:3])
    return (
        f"no input of @{module.main.name} ({args}) begins with a symbolic dimension, so there is "
        "no batch to shard over dp; leave dp out, or give the batch a symbol such as B"
    )


def _no_weight(plan: Plan, axis: str) -> str:
    rows, names = plan.rows, list(plan.module.weights)[:3]
    shown = f", whose weights are called {', '.join(f'@{name}' for name in names)}" if names else ""
    if not rows:
        return (
            f"the plan {DEFAULT} shards no weight of this module over {axis}{shown}; no product or "
            f"lookup has one with an element of a dimension for every rank, so leave {axis} out"
        )
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return (
        f"the plan ({rows[0].source}: {rows[0]}{more}) shards no weight of this module over {axis}"
        f"{shown}; write rows for these names in a file, such as *.fc.weight 0@{axis}, and give it "
        'as plan="FILE"'
    )


def _split(plan: Plan, value: Value, row: Row) -> None:
    """Apply one row to one value."""
    axes: list[Axes] = list(value.type.axes)
    for dim, wanted in row.splits:
        over = plan.mesh_axes(wanted, axes)
        if not over:
            continue
        if dim >= len(axes):
            raise Error(
                f"{row.source}: {row} shards dimension {dim} of {value_name(value)}, which is "
                f"{value.type}"
            )
        taken = {axis for group in axes for axis in group}
        twice = next((axis for i, axis in enumerate(over) if axis in {*taken, *over[:i]}), None)
        if twice is not None:
            raise Error(
                f"{row.source}: {row} on {value_name(value)}, which is {value.type}: "
                f"{twice} shards it twice; write each axis once (in a mesh with ep, tp stands for "
                "ep.tp where the row does not name ep before it)"
            )
        axes[dim] = (*axes[dim], *over)
    if tuple(axes) != value.type.axes:
        value.type = value.type.replace(axes=tuple(axes))
        plan.stats.explain(f"{value_name(value)} is {value.type}: {row.source}")


# -- the share of the weights that is sharded, and why the rest is replicated


_SHOWN = 3  # kinds of replicated weights
_UNNAMED = "no row of the plan names it"
_NO_PRODUCT = "no product and no lookup uses it"


def share_of_weights(plan: Plan) -> str:
    """A sentence about a sharded module; "" where its mesh has no axis over which rows shard."""
    module = plan.module
    planned = plan.axes - {BATCH}
    axes = [axis for axis, size in module.mesh.axes if size > 1 and axis in planned]
    if not axes:
        return ""
    sizes = {name: _bytes(weight) for name, weight in module.weights.items()}
    total, rest = sum(sizes.values()), dict[tuple[str, str], int]()
    for name, weight in module.weights.items():
        if not weight.type.sharded and sizes[name]:
            row = plan.row_of(weight)
            why = _NO_PRODUCT if plan.rest is Rest.CHOSEN else _UNNAMED
            key = general(plan.origin(name)), why if row is None else row.source
            rest[key] = rest.get(key, 0) + sizes[name]
            plan.stats.explain(f"@{name} {REPLICATED} {key[1]}")
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
        says += f", or the row {DEFAULT}"
    return says


def _size(item: tuple[object, int]) -> int:
    return item[1]


def _bytes(weight: Weight) -> int:
    count = product(weight.type.shape)
    return 0 if isinstance(count, Dim) else dtype(weight.type.dtype).nbytes(count)


# -- notes about the layers of a model, with equal notes of many layers merged


_NAME = re.compile(r"(?<![^\s(])(?:[@%]\w+(?:\.\w+)*|[A-Za-z_]\w*(?:\.\w+)+)")


def grouped(notes: list[str]) -> list[str]:
    """The notes in order; those that differ in the numbers within names only are one, counted."""
    groups: dict[str, list[str]] = {}
    for note in notes:
        groups.setdefault(_NAME.sub(lambda match: general(match[0]), note), []).append(note)
    return [_told(pattern, same) for pattern, same in groups.items()]


def _told(pattern: str, same: list[str]) -> str:
    return same[0] if len(set(same)) == 1 else f"{pattern} ({len(same)} times)"
