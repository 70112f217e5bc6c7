"""Axes of the mesh over which nothing is sharded."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.core import Module
from ..weights import Shard
from .stages import PIPELINE, stage_of


def idle_axes(module: Module) -> list[str]:
    """A sentence per axis of several ranks that nothing in a module of either view uses."""
    used = set(_used(module))
    return [
        f"nothing is sharded over the mesh axis {axis}: its {size} ranks do the same; "
        f"{_advice(axis)}"
        for axis, size in module.mesh.axes
        if size > 1 and axis not in used
    ]


def _advice(axis: str) -> str:
    if axis == PIPELINE:
        return "put pipeline among the passes, or leave the axis out"
    return "leave the axis out, or shard something over it by a plan"


def _used(module: Module) -> Iterator[str]:
    """The axes that something is sharded or summed over, with repetitions."""
    values = [*module.weights.values(), *(value for op in module.ops() for value in op.results)]
    values += [arg for function in module.functions.values() for arg in function.args]
    for value in values:
        yield from value.type.global_type.spread
    for weight in module.weights.values():
        for step in weight.ref.every_step():
            yield from step.axes if isinstance(step, Shard) else ()
    for op in module.ops():
        axis = op.attributes.get("axis")
        yield from axis.split(".") if isinstance(axis, str) else ()
        if stage_of(op) >= 0:
            yield PIPELINE
