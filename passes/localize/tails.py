"""What a padded dimension holds behind its end: zeros, finite numbers, or anything.

A NaN of an input may be in padding, but only beside true elements that are all NaN as well, so that
it spoils no sum that is not spoilt already. Infinities make NaN with the zeros of weights: what may
be infinite leaves nothing known.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Literal, TypeAlias

from irc.core import Op, Value, Weight
from irc.dtypes import is_float
from irc.ops import (
    Cast,
    Embedding,
    Expand,
    GatedMlp,
    Linear,
    Matmul,
    ReduceSum,
    Reshape,
    Squeeze,
    Transpose,
    Unsqueeze,
)
from irc.ops.factors import factor_groups
from irc.ops.shapes import positions
from irc.types import TensorType

from .bounded import is_bounded

State: TypeAlias = Literal["zero", "finite", "unknown"]

_DEPTH = 64  # operations that are followed back
_WORST: dict[State, int] = {"zero": 0, "finite": 1, "unknown": 2}
# What functions of one operand make of zero, and of another finite number.
_KEEP: tuple[State, State] = ("zero", "finite")
_FUNCTIONS: dict[str, tuple[State, State]] = {
    **dict.fromkeys(["abs", "ceil", "erf", "floor", "gelu", "neg", "quick_gelu", "relu"], _KEEP),
    **dict.fromkeys(["round", "sign", "silu", "sin", "squared_relu", "tanh"], _KEEP),
    **dict.fromkeys(["cos", "sigmoid", "softplus"], ("finite", "finite")),
    "exp": ("finite", "unknown"),
    "sqrt": ("zero", "unknown"),
}
# The attributes of collectives that name the dimension they cut, and the one whose parts they join.
_CUT_AND_JOINED = {
    "all_reduce": ("", ""),
    "all_gather": ("", "dim"),
    "reduce_scatter": ("dim", ""),
    "shard_slice": ("dim", ""),
    "all_to_all": ("split", "concat"),
}


class Tails:
    """Follows padding back to where it comes from, in the global view.

    The padding of weights and of `inputs` is zeros. `type_of` gives global types.
    """

    def __init__(self, type_of: Callable[[Value], TensorType], inputs: Set[Value]) -> None:
        self._type, self._inputs = type_of, inputs
        self._known: dict[tuple[Value, int], State] = {}
        self._depth = 0

    def state(self, value: Value, dim: int) -> State:
        """What the padding of `value` along `dim` holds, which is split there."""
        if isinstance(value, Weight) or value in self._inputs:
            return "zero"
        op = value.producer
        if op is None or self._depth >= _DEPTH:
            return "unknown"
        key = (value, dim)
        if key not in self._known:
            self._depth += 1
            self._known[key] = self._made(op, value, dim)
            self._depth -= 1
        return self._known[key]

    def _made(self, op: Op, value: Value, dim: int) -> State:
        known = _FUNCTIONS.get(op.opname)
        if known is not None:
            state = self.state(op.operands[0], dim)
            return "unknown" if state == "unknown" else known[_WORST[state]]
        if op.opname in _CUT_AND_JOINED:
            return self._moved(op, dim)
        match op:
            case Cast():
                return self._cast(op, dim)
            case Linear() | GatedMlp() | Embedding() | Matmul():
                return self._product(op, dim)
            case Transpose() | Reshape() | Expand() | Squeeze() | Unsqueeze() | ReduceSum():
                return self._shaped(op, dim)
            case _:
                return self._elementwise(op, value, dim)

    def _cast(self, op: Cast, dim: int) -> State:
        """NaN becomes any integer; a number stays what it is."""
        keeps = is_float(op.result.type.dtype) or not is_float(self._type(op.x).dtype)
        return self.state(op.x, dim) if keeps else "unknown"

    def _moved(self, op: Op, dim: int) -> State:
        """Collectives leave alone what they neither cut nor join; what they cut gets zeros."""
        x, rank = op.operands[0], op.result.type.rank
        cut, joined = (
            op.attributes[name] % rank if name in op.attributes else None
            for name in _CUT_AND_JOINED[op.opname]
        )
        if dim not in (cut, joined):
            return self.state(x, dim)
        return "zero" if dim == cut and not self._type(x).axes[dim] else "unknown"

    def _product(self, op: Op, dim: int) -> State:
        """Zero rows of weights give zeros, if what they are multiplied by is nowhere infinite."""
        last = dim == op.result.type.rank - 1
        rows: list[tuple[Value, int]] = []
        match op:
            case Embedding():
                return self.state(op.table, 1) if last else "unknown"
            case Linear() | GatedMlp() if last:
                rows = [(value, 0) for value in op.operands[1:]]
            case Matmul() if last:
                rows = [(op.y, self._type(op.y).rank - 1)]
            case _:
                pass
        zero = rows and all(self.state(*place) == "zero" for place in rows)
        return "zero" if zero and is_bounded(op.operands[0]) else "unknown"

    def _shaped(self, op: Op, dim: int) -> State:
        x = op.operands[0]
        return self.state(x, _before(op, self._type(x), dim))

    def _elementwise(self, op: Op, value: Value, dim: int) -> State:
        """Of add, sub, maximum and minimum the worst; a product is zero where a factor is."""
        if op.opname not in ("add", "sub", "mul", "maximum", "minimum"):
            return "unknown"
        states: list[State] = [self._operand(operand, value, dim) for operand in op.operands]
        states.sort(key=_WORST.__getitem__)
        return states[0] if op.opname == "mul" and states[-1] != "unknown" else states[-1]

    def _operand(self, operand: Value, result: Value, dim: int) -> State:
        """What an operand has beside the padding of the result: padding, or a true element."""
        type = self._type(operand)
        at = dim - (result.type.rank - type.rank)
        if at >= 0 and type.axes[at] == result.type.axes[dim]:
            return self.state(operand, at)
        return "finite" if is_bounded(operand) else "unknown"


def _before(op: Op, old: TensorType, dim: int) -> int:
    """The dimension of the operand whose parts are the parts of a split dimension of the result."""
    rank = op.result.type.rank
    if isinstance(op, Transpose):
        return op.order[dim] % rank
    if isinstance(op, Reshape):
        groups = factor_groups(old.shape, op.shape)
        return next(olds[0] for olds, news in groups if news[:1] == [dim])
    if isinstance(op, Unsqueeze):
        return dim - sum(new < dim for new in positions(op.opname, op.dims, rank))
    if isinstance(op, Expand) or (isinstance(op, ReduceSum) and op.keep):
        return dim - (rank - old.rank)
    gone = positions(op.opname, op.attributes["dims"], old.rank)
    return [i for i in range(old.rank) if i not in gone][dim]
