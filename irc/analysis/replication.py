"""Layouts of the values of a local module, and whether its results are those that it declares.

Types of the local view are plain, so nothing else shows there that a pass has lost a collective.
"""

from __future__ import annotations

from functools import partial

from ..errors import Error
from ..ir.core import Function, Module, Value
from ..ir.mesh import Mesh
from ..ir.types import TensorType
from ..ops.control import Call
from .frames import Dataflow, Frame
from .layout import WHOLE, Layout, Names, layout_of_type, place_text
from .origin import origin


def entries(module: Module) -> list[Function]:
    """The functions without callers: those that a user may run."""
    called = {op.callee for op in module.ops() if isinstance(op, Call)}
    return [function for function in module.functions.values() if function not in called]


def replication(module: Module) -> dict[Value, Names]:
    """The mesh axes over which every value may differ between ranks, in a local module.

    Over every other axis it is replicated. A value of a function with several calls has the axes of
    all of them. An Error where the module is wrong, see `check_replication`.
    """
    found: dict[Value, Names] = {}
    for frame in _followed(module).frames.values():
        for value, layout in frame.layouts.items():
            found[value] = found.get(value, frozenset()) | layout.axes
    return found


def check_replication(module: Module) -> None:
    """An Error where a local module is no localization of a global one, see decision 0015.

    Every operation is one rank's part of the same operation on global values, every collective
    converts a layout that its operand has, and results have the layouts that are declared.
    """
    _followed(module)


def _followed(module: Module) -> Dataflow:
    if not module.local:
        raise Error(
            f"module @{module.name} is in the global view, where types say what is sharded; "
            "localize it first"
        )
    flow = Dataflow(module, partial(_check_results, module.mesh))
    for function in entries(module):
        flow.entry(function)
    return flow


def _check_results(mesh: Mesh, frame: Frame, called: bool) -> None:
    """Results have their layouts; those of a function that is called may have none."""
    function = frame.function
    names = function.result_names()
    declared = function.result_layouts()
    for name, value, found, type in zip(
        names, function.returned, frame.returned, declared, strict=True
    ):
        wanted = layout_of_type(type, mesh)
        undeclared = called and name not in function.layouts
        if undeclared or found.uniform or 0 in value.type.shape or _fits(found, wanted):
            continue
        producer = value.producer
        at = producer if producer is not None and producer.loc is not None else function.last
        raise Error(
            _message(f"the result {name} of @{function.name}", value, type, wanted, frame), at
        )


def _fits(found: Layout, wanted: Layout) -> bool:
    """Whether a value is what a result declares; one made by rank is a shard of any dimension."""
    if found.partial != wanted.partial or found.relative or found.root:
        return False
    changed = [(a, b) for a, b in zip(found.dims, wanted.dims, strict=True) if a != b]
    made = [(WHOLE, found.numbered)] if found.numbered else []
    return changed == made


def _message(what: str, value: Value, type: TensorType, wanted: Layout, frame: Frame) -> str:
    found = frame.layouts[value]
    for axis in sorted(found.axes - wanted.axes):
        return (
            f"{what} may differ between the ranks of {axis}, but its layout says that it does "
            f"not, because {origin(value, axis, frame.layouts)}"
        )
    for axis in sorted(found.partial):
        return (
            f"{what} is a partial sum over {axis}, but its layout is {type}, "
            f"because {origin(value, axis, frame.layouts)}"
        )
    dims = [
        f"{place_text(a)} instead of {place_text(b)}"
        for a, b in zip(found.dims, wanted.dims, strict=True)
        if a != b
    ]
    return f"{what} does not have its layout: a dimension is {' and one '.join(dims)}"
