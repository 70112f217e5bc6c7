"""`fuse-qkv`: the projections before an attention become one linear and a split."""

from __future__ import annotations

from irc.ir.core import Module, Op, Value
from irc.ops import LayerNorm, RmsNorm, Rope
from irc.pipeline import Pass, Stats, register
from irc.rewrite import permit, report_failure

from .shared.joining import fuse_linears, join_refusal, parameters_of
from .shared.parameters import same, weights_of

_NAME = "fuse-qkv"


@register(_NAME)
class FuseQkv(Pass):
    """Linears of one input that feed one attention become one linear and a split.

    Three linears, or two where a checkpoint merges k and v. The weights, and the biases if all
    have one, become concatenated references; so do the codes, scales and zeros of quantized
    weights. They must be weights of the module, not sharded over the mesh, and have no other use.
    Norms of the heads, rope and cache updates may lie between the linears and the attention.
    """

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            for op in function:
                if op.opname == "attention":
                    _fuse_before(module, op, stats)


def _fuse_before(module: Module, attention: Op, stats: Stats) -> None:
    found = _linears(attention)
    if isinstance(found, str):
        report_failure(_NAME, attention, found)
    elif permit(_NAME, attention):
        assert attention.parent is not None
        first = next(op for op in attention.parent if op in found)
        fuse_linears(module, found, "qkv", first)
        stats.count("fused")


def _linears(attention: Op) -> list[Op] | str:
    """The linears, or why they cannot be fused."""
    linears: list[Op] = []
    for letter, value in zip("qkv", attention.operands[:3], strict=True):
        op = _source(value)
        if op is None or op.opname != "linear":
            source = "no operation" if op is None else op.opname
            return f"{letter} of attention comes from {source}, not from a linear"
        linears += [] if op in linears else [op]
    if len(linears) == 1:
        return "q, k and v of attention come from one linear already"
    if not all(same(op.operands[0], linears[0].operands[0]) for op in linears):
        return "the linears of q, k and v have different inputs"
    if len({op.present for op in linears}) > 1:
        return "some of the linears of q, k and v have a bias and some have none"
    groups = parameters_of(linears)
    if any(weights_of(value) is None for group in groups for value in group):
        return "a linear of q, k or v takes a computed or shared value for a weight"
    return next(filter(None, map(join_refusal, groups)), linears)


def _source(value: Value) -> Op | None:
    """The operation that makes a value, seen through moves, rope, norms and cache updates."""
    op = value.producer
    while op is not None and (op.moves_data or isinstance(op, (Rope, RmsNorm, LayerNorm))):
        op = op.operands[1 if op.in_place else 0].producer
    return op
