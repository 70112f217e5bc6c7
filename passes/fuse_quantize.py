"""`fuse-quantize`: the quantization of rows when the model runs becomes one operation."""

from __future__ import annotations

from irc.errors import Error
from irc.ir.core import Module, Value
from irc.ops import Dequantize, DynamicScale, Quantize, QuantizeRows, RmsNorm
from irc.pipeline import Pass, Stats, register
from irc.rewrite import erase_dead, permit, report_failure

from .shared.edit import insert_before, same_types

_NAME = "fuse-quantize"


@register(_NAME)
class FuseQuantize(Pass):
    """dynamic_scale of rows, quantize and dequantize by it become one operation, `quantize_rows`.

    So does the rms_norm in front, where nothing else uses it. Over several ranks it comes behind
    `localize`, which knows the scales of rows that are sharded.
    """

    def run(self, module: Module, stats: Stats) -> None:
        for op in list(module.ops()):
            if isinstance(op, DynamicScale):
                _fuse(op, stats)


def _fuse(op: DynamicScale, stats: Stats) -> None:
    try:
        codes = _codes(op)
    except Error as error:
        report_failure(_NAME, op, error.message)
        return
    numbers = [
        user
        for user in codes.result.users
        if isinstance(user, Dequantize) and user.scale is op.result and user.zero is None
    ]
    replaced: list[Value] = [codes.result, op.result, *(user.result for user in numbers[:1])]
    x, norm = op.x, op.x.producer
    if not isinstance(norm, RmsNorm) or not {op, codes}.issuperset(norm.result.users):
        norm = None
    attributes = {} if norm is None else norm.attributes
    attributes |= {"codes": op.dtype, "scale": op.scale, "dtype": (*replaced, x)[2].type.dtype}
    new = QuantizeRows(x if norm is None else norm.x, weight=norm and norm.weight, **attributes)
    if not same_types(new, replaced):
        report_failure(_NAME, op, "rows are sharded")
        new.drop_operands()
    elif not permit(_NAME, op):
        new.drop_operands()
    else:
        insert_before(new, op)
        for old, result in zip(replaced, new.results, strict=False):
            old.replace_by(result)
        for dead in (*numbers[:1], codes, op):
            erase_dead(dead)
        stats.count(new.opname)


def _codes(op: DynamicScale) -> Quantize:
    """The codes by a scale; an Error where they are not those of quantize_rows."""
    if op.block not in (0, op.x.type.shape[-1]):
        raise Error("a row has several scales")
    if op.tensor_scale is not None:
        raise Error("the scales are divided by one of the tensor")
    for user in op.result.users:
        if not isinstance(user, Quantize) or user.zero is not None:
            continue
        if user.x is op.x and user.scale is op.result and user.dtype == op.dtype:
            return user
    raise Error(f"nothing is quantized to {op.dtype} by the scale")
