"""A tiny engine that sums a vector over the ranks of a stage with TensorRT's own collectives.

If a stage uses these, loading runs the probe on values that show which ranks took part: in some
versions the collectives do nothing and report no error.
"""

from __future__ import annotations

from irc.analysis.stages import Stage, stage_axes
from irc.ir.core import Function, Module, Result
from irc.ir.types import TensorType
from irc.ops import AllReduce, Return

MODEL = "probe.onnx"
MINE, TOTAL = "mine", "total"  # its input and its result, f32[ranks]


def probe(module: Module) -> Stage:
    """The probe for the ranks of the first stage; every other stage has as many."""
    axes = stage_axes(module.mesh)
    ranks = module.mesh.groups(axes)[0]
    function = Function("probe", [(MINE, TensorType("f32", (len(ranks),)))])
    total = AllReduce(function.args[0], axis=".".join(axes), group_size=len(ranks))
    function.append(total)
    function.append(Return(total.results))
    function.results = (Result(TOTAL),)
    return Stage(function, ranks)
