"""`fuse-norm`: an addition and the norm of the sum become one operation."""

from __future__ import annotations

from irc.ir.core import Module, Op
from irc.ops import Add, AddLayerNorm, AddRmsNorm, LayerNorm, RmsNorm
from irc.pipeline import Pass, Stats, register
from irc.rewrite import erase_dead, permit, report_failure

from .shared.edit import insert_before, known_before

_NAME = "fuse-norm"


@register(_NAME)
class FuseNorm(Pass):
    """A residual addition and the rms_norm or layer_norm behind it become one operation.

    Its results are the norm and the sum, which later additions use. It is for backends with a
    kernel of it: the others run both operations as before.
    """

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            for op in list(function):
                if isinstance(op, (RmsNorm, LayerNorm)) and isinstance(op.x.producer, Add):
                    _fuse(op, op.x.producer, stats)


def _fuse(norm: RmsNorm | LayerNorm, total: Add, stats: Stats) -> None:
    refusal = _refusal(norm, total)
    if refusal is not None:
        report_failure(_NAME, norm, refusal)
    elif permit(_NAME, norm):
        fused = AddRmsNorm if isinstance(norm, RmsNorm) else AddLayerNorm
        named = dict(list(norm.named_operands())[1:])
        new: Op = fused(total.x, total.y, **named, **norm.attributes)
        insert_before(new, total).loc = norm.loc
        for old, result in zip((norm.result, total.result), new.results, strict=True):
            old.replace_by(result)
        norm.erase()
        erase_dead(total)
        stats.count(new.opname)


def _refusal(norm: Op, total: Add) -> str | None:
    """Why a norm stays apart from an addition."""
    if total.x.type is not total.y.type:
        return f"the sum is of {total.x.type} and {total.y.type}, not of two equal types"
    late = [value for value in norm.operands[1:] if not known_before(value, total)]
    return "its weight is computed behind the sum" if late else None
