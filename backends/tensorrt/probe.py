"""A tiny engine that sums a vector over the ranks of a stage, as TensorRT's own collectives do.

Where a stage uses these, loading runs it on values that tell who was added: versions are known
whose collectives do nothing, and say nothing.
"""

from __future__ import annotations

from irc.backends.onnx.stages import Stage, stage_axes
from irc.core import Function, Module, Result
from irc.ops import AllReduce, Return
from irc.types import TensorType

MODEL = "probe.onnx"
MINE, TOTAL = "mine", "total"  # its input and its result, f32[ranks]


def probe(module: Module) -> Stage:
    """What the ranks of the first stage run; those of every other are as many."""
    axes = stage_axes(module.mesh)
    ranks = module.mesh.groups(axes)[0]
    function = Function("probe", [(MINE, TensorType("f32", (len(ranks),)))])
    total = AllReduce(function.args[0], axis=".".join(axes), ways=len(ranks))
    function.append(total)
    function.append(Return(total.results))
    function.results = (Result(TOTAL),)
    return Stage(function, ranks)
