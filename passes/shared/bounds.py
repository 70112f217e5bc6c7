"""Which values hold no infinity, by the facts of the operations that compute them."""

from __future__ import annotations

from irc.ir.core import Op, Value, Weight
from irc.ir.dtypes import is_float
from irc.ops import Constant, Div, Full, Mul

_DEPTH = 16  # operations that are followed back


def is_bounded(value: Value, depth: int = _DEPTH, weights: bool = False) -> bool:
    """Whether no element is infinite, whatever the inputs of a model are; NaN may be in it.

    With `weights` those count as finite.
    """
    if not is_float(value.type.dtype) or (weights and isinstance(value, Weight)):
        return True
    op = value.producer
    if op is None or depth == 0:
        return False
    bound = op.bound(value.index)
    return bound == "always" or (
        bound == "operands" and all(is_bounded(v, depth - 1, weights) for v in op.operands)
    )


def keeps_finite_sums(op: Op, value: Value) -> bool:
    """Whether the partial sum `value` gets no new infinities where `op` multiplies or divides it.

    A product with an infinity or a quotient by zero gives every rank an infinity, maybe of another
    sign, and their sum is NaN where the operation on the complete sum is not. Weights count as
    finite. Contractions are not looked at: completing their operands may send far more.
    """
    if isinstance(op, Div):
        y = op.y.producer
        if isinstance(y, Full):
            return y.value != 0
        return isinstance(y, Constant) and 0 not in y.values
    others = [other for other in op.operands if other is not value]
    return not isinstance(op, Mul) or all(is_bounded(other, weights=True) for other in others)


def needs_complete(op: Op, value: Value) -> bool:
    """Whether an operation is not additive in a value, or may make it infinite on some ranks."""
    names = {name for name, operand in op.named_operands() if operand is value}
    additive = all(any(name in group for group in op.sums) for name in names)
    return not additive or not keeps_finite_sums(op, value)
