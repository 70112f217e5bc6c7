"""A tiny engine that sums a vector over the ranks of a stage, as TensorRT's own collectives do.

Where a stage uses these, loading runs it on values that tell who was added: versions are known
whose collectives do nothing, and say nothing.
"""

from __future__ import annotations

from irc.backends.onnx.stages import AXIS, Stage
from irc.core import Function, Module, Result
from irc.mesh import Mesh
from irc.ops import AllReduce, Return
from irc.types import TensorType

MODEL = "probe.onnx"
MINE, TOTAL = "mine", "total"  # its input and its result, f32[ranks]


def ranks_of(mesh: Mesh) -> list[int]:
    """The ranks of the first stage; those of every other are as many."""
    axes = _axes(mesh)
    return next(iter(mesh.groups(axes)))


def probe(module: Module) -> Stage:
    """What the ranks of a stage run."""
    ranks = ranks_of(module.mesh)
    function = Function("probe", [(MINE, TensorType("f32", (len(ranks),)))])
    axis = ".".join(_axes(module.mesh))
    total = AllReduce(function.args[0], axis=axis, ways=len(ranks))
    function.append(total)
    function.append(Return(total.results))
    function.results = (Result(TOTAL),)
    return Stage(function, ranks)


def _axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in mesh.names if name != AXIS)
