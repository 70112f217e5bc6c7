"""`fuse-linears`: linears of one input become one linear and a split."""

from __future__ import annotations

from irc.ir.core import Function, Module
from irc.ops import Linear
from irc.pipeline import Pass, Stats, register
from irc.rewrite import permit, report_failure

from .shared.joining import differing, form_of, fuse_linears, join_refusal, parameters_of
from .shared.parameters import weights_of

_NAME = "fuse-linears"


@register(_NAME)
class FuseLinears(Pass):
    """Linears of one input, whose weights have one format, become one linear and a split.

    Such as q, k and v, or gate and up. With `codes`, only those whose weights, or the codes of
    whose quantized weights, have one of these dtypes: the builder of TensorRT joins the products
    of plain weights itself, but not those of quantized ones.
    """

    codes: tuple[str, ...] = ()

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
            if isinstance(op, Linear) and all(weights_of(value) for value in op.operands[1:]):
                codes = (weights_of(op.weight) or [])[0].type.dtype
                if not self.codes or codes in self.codes:
                    forms = tuple(form_of(value) for value in op.operands[1:])
                    found.setdefault((op.x, forms), []).append(op)
        return [linears for linears in found.values() if len(linears) > 1]
