"""What the padding of a sharded dimension holds: zeros, finite numbers, or anything.

A NaN of an input may reach padding, but only where the true elements beside it are all NaN as well,
so that it changes no sum. An infinity gives NaN with the zeros of weights: where a value may be
infinite, nothing is known of the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Literal, TypeAlias

from irc.ir.core import Op, Value, Weight
from irc.ir.declare import placeholder
from irc.ir.dtypes import is_float
from irc.ir.sharding import operand_words, parse_rule, result_words
from irc.ir.types import TensorType
from irc.ops import Dequantize, DynamicScale, Quantize
from irc.ops.collective import Exchange
from irc.ops.quant import QuantizedOp

from ..shared.bounds import is_bounded
from ..shared.parameters import weights_of

State: TypeAlias = Literal["zero", "finite", "unknown"]

_DEPTH = 64  # operations that are followed back for padding


class Padding:
    """Follows padding back to where it comes from, in the global view.

    The padding of weights and of `inputs` is zeros. `type_of` gives global types.
    """

    def __init__(self, type_of: Callable[[Value], TensorType], inputs: Set[Value]) -> None:
        self._type, self._inputs = type_of, inputs
        self._known: dict[tuple[Value, int], State] = {}
        self._depth = 0

    def state(self, value: Value, dim: int) -> State:
        """What the padding of `value` along its sharded dimension `dim` holds."""
        if isinstance(value, Weight) or value in self._inputs:
            return "zero"
        op = value.producer
        if op is None or self._depth >= _DEPTH:
            return "unknown"
        key = (value, dim)
        if key not in self._known:
            self._depth += 1
            self._known[key] = self._result(op, value, dim)
            self._depth -= 1
        return self._known[key]

    def _result(self, op: Op, value: Value, dim: int) -> State:
        """The state of a result, from the operands' by the sharding rule and the facts."""
        if isinstance(op, Exchange):
            return self._communicated(op, dim)
        if isinstance(op, QuantizedOp) and self._scales_zeros(op, dim):
            return "zero"
        if isinstance(op, Dequantize) and weights_of(value):
            return "finite"
        floats = [is_float(operand.type.dtype) for operand in op.operands]
        if any(floats) and not is_float(value.type.dtype):
            return "unknown"  # NaN becomes any integer
        stand_ins = tuple(Value(self._type(v), None, i) for i, v in enumerate(op.operands))
        view = placeholder(op, stand_ins)
        view.results = op.results
        text = view.sharding_rule()
        if text is None:
            return "unknown"
        rule = parse_rule(text)
        word = result_words(rule, [result.type for result in op.results])[value.index][dim]
        names: list[str] = []
        states: list[State] = []
        holders: list[bool] = []
        for operand, (name, words) in zip(op.operands, operand_words(view, rule), strict=True):
            holds = word in words
            holders.append(holds or rule.is_elementwise)
            if holders[-1] and name in op.safe_values:
                return "unknown"  # padding chooses any element, or divides by zero
            names.append(name)
            at = words.index(word) if holds else None
            states.append(self._beside(operand, at, value.type.axes[dim]))
        if "unknown" in states:
            return "unknown"
        zeros = {name for name, state in zip(names, states, strict=True) if state == "zero"}
        others = set(names) - zeros
        if any(zeros & group and not others & group for group in op.sums):
            return "zero"
        held = [state for state, holds in zip(states, holders, strict=True) if holds]
        if op.keeps_zeros and all(state == "zero" for state in held):
            return "zero"
        local = rule.is_elementwise or op.moves_data
        return "finite" if local and op.bound(value.index) != "no" else "unknown"

    def _scales_zeros(self, op: QuantizedOp, dim: int) -> bool:
        """Whether x is zero, and the zero point if any; scales are finite, and positive if real."""
        axes = op.results[0].type.axes[dim]
        for part in (op.x, op.zero):
            if part is None:
                continue
            if self._type(part).axes[dim] != axes or self.state(part, dim) != "zero":
                return False
        divides = isinstance(op, Quantize) and not isinstance(op.scale.producer, DynamicScale)
        return not (divides and self._type(op.scale).axes[dim])

    def _beside(self, operand: Value, at: int | None, axes: tuple[str, ...]) -> State:
        """What an operand has beside the padding of the result: padding, or true elements."""
        if at is not None and self._type(operand).axes[at] == axes:
            return self.state(operand, at)
        return "finite" if is_bounded(operand) else "unknown"

    def _communicated(self, op: Exchange, dim: int) -> State:
        """Dimensions that are neither gathered nor scattered stay; scattered ones get zeros."""
        x, ndim = op.x, op.result.type.ndim
        if op.root_sends or op.root_receives:
            return "unknown"
        gathered, scattered = (
            getattr(op, name) % ndim if name else None for name in (op.gathers, op.scatters)
        )
        if dim not in (gathered, scattered):
            state = self.state(x, dim)
            return state if state == "zero" or op.moves_data else "unknown"
        return "zero" if dim == scattered and not self._type(x).axes[dim] else "unknown"
