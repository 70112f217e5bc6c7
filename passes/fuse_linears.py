"""`fuse-linears`: linears of one input become one linear and a split."""

from __future__ import annotations

from irc.ir.core import Function, Module, Value
from irc.ops import Dequantize, Linear
from irc.pipeline import Pass, Stats, register
from irc.rewrite import permit, report_failure

from .shared.joining import differing, form_of, fuse_linears, join_refusal, parameters_of
from .shared.parameters import weights_of

_NAME = "fuse-linears"


@register(_NAME)
class FuseLinears(Pass):
    """Linears of one input, whose weights have one format, become one linear and a split.

    Such as q, k and v, or gate and up. With `blocks`, only those whose weights are quantized in
    blocks of their inputs: the builder of TensorRT joins other products itself where that helps.
    """

    blocks: bool = False

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            for linears in self._groups(function):
                groups = parameters_of(linears)
                refusal = next(filter(None, map(join_refusal, groups)), None)
                if refusal is not None:
                    report_failure(_NAME, linears[0], refusal)
                elif permit(_NAME, linears[0]):
                    fuse_linears(module, linears, differing(groups[0]), linears[0])
                    stats.count("fused")

    def _groups(self, function: Function) -> list[list[Linear]]:
        """The linears that have an input and the formats of parameters in common."""
        found: dict[object, list[Linear]] = {}
        for op in function:
            if not isinstance(op, Linear) or (self.blocks and not _in_blocks(op.weight)):
                continue
            if all(weights_of(value) for value in op.operands[1:]):
                forms = tuple(form_of(value) for value in op.operands[1:])
                found.setdefault((op.x, forms), []).append(op)
        return [linears for linears in found.values() if len(linears) > 1]


def _in_blocks(weight: Value) -> bool:
    """Whether the inputs of a row have several scales."""
    op = weight.producer
    return isinstance(op, Dequantize) and op.scale.type.shape[-1] != 1
