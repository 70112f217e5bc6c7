"""Collectives for TensorRT: what they are made of besides the nodes that exchange."""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import Flat, Lowered
from irc.backends.onnx.lower_collective import rank as constant_rank
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.backends.tensorrt.nodes import COLLECTIVE_PLUGIN
from irc.core import Op
from irc.dims import Dim


@CHOICES.lower(
    ops.Rank,
    choice="i32 input",
    reason="one engine serves all ranks of a stage; a constant where weights are inside",
    source="irc/decisions/0011-one-engine-for-all-ranks-of-a-stage.md",
)
def rank(e: TensorRTEmitter, op: ops.Rank) -> Lowered:
    return e.position(op, op.axes) or constant_rank(e, op)


def no_plugin(op: Op) -> str | None:
    """Refuses what the kernel of the plugin does not take."""
    if isinstance(op.operands[0].type.shape[-1], Dim):
        return "has rows of a symbolic width"
    return None


@CHOICES.lower(
    ops.AllReduceRmsNorm,
    choice=COLLECTIVE_PLUGIN,
    reason="the sum, the residual and the norm are one kernel behind the collective",
    source="irc/ops/fused_collective.py",
    unless=no_plugin,
)
def all_reduce_rms_norm(e: TensorRTEmitter, op: ops.AllReduceRmsNorm) -> Lowered:
    if e.wanted == "native" or e.module.mesh.ways(op.axes) == 1:
        return _in_parts(e, op)
    normed, total = e.plugin(
        op.axes,
        "all_reduce_rms_norm",
        "sum",
        -1,
        [e.flat(op.x), e.flat(op.residual), _scale(e, op)],
        outputs=2,
        eps=repr(op.eps),
        offset=repr(op.offset),
    )
    return Flat(normed), Flat(total)


def _in_parts(e: TensorRTEmitter, op: ops.AllReduceRmsNorm) -> Lowered:
    x, ways = e.flat(op.x), e.module.mesh.ways(op.axes)
    total = e.collective(op, "all_reduce", ways, x) if ways > 1 else x
    total = e.add("Add", total, e.flat(op.residual))
    scale = _scale(e, op)
    if op.offset:
        scale = e.add("Add", scale, e.number(op.offset, op.x.type.dtype))
    return Flat(e.add("RMSNormalization", total, scale, axis=-1, epsilon=op.eps)), Flat(total)


def _scale(e: TensorRTEmitter, op: ops.AllReduceRmsNorm) -> str:
    kind = op.x.type.dtype
    return e.get(op.weight) if op.weight.type.dtype == kind else e.cast(e.get(op.weight), kind)
