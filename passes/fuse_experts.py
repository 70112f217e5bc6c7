"""`fuse-experts`: the feed-forwards between moe_dispatch and moe_combine become one operation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from irc.errors import Error
from irc.ir.core import Module, Op, Value
from irc.ops import Add, Clip, Experts, Matmul, Minimum, MoeCombine, MoeDispatch, Mul, Transpose
from irc.ops.mlp import act_of
from irc.pipeline import Pass, Stats, register
from irc.rewrite import apply_rules, erase_dead, permit, report_failure
from irc.rewrite.constants import uniform

from .fuse_gated_mlp.activations import ACTIVATIONS
from .shared.edit import insert_before, same_types

_NAME = "fuse-experts"
_PAIRS = ("chosen", "slots", "first", "parts")  # what dispatch and combine have in common
Kind = TypeVar("Kind", bound=Op)


@register(_NAME)
class FuseExperts(Pass):
    """moe_dispatch, products with the weights of experts, activation and moe_combine become one.

    The operation is `experts`, of gated feed-forwards or plain ones, with biases. Activations
    written out become one operation before. Over several ranks it comes behind `localize`, where
    the experts of a rank have numbers.
    """

    def run(self, module: Module, stats: Stats) -> None:
        combines = [op for op in module.ops() if isinstance(op, MoeCombine)]
        if combines:
            stats.update(apply_rules(module, ACTIVATIONS))
        for op in combines:
            _fuse(op, module.mesh.ranks > 1 and not module.local, stats)


def _fuse(combine: MoeCombine, is_global: bool, stats: Stats) -> None:
    try:
        if is_global:
            raise Error("the experts are those of all ranks; fuse them behind localize")
        new = _Mixture(combine).fused()
    except Error as error:
        report_failure(_NAME, combine, error.message)
        return
    if not same_types(new, combine.results):
        report_failure(_NAME, combine, f"the sum over ranks would be {new.result.type}")
        new.drop_operands()
    elif permit(_NAME, combine):
        combine.result.replace_by(insert_before(new, combine).result)
        erase_dead(combine)
        stats.count(new.opname)
    else:
        new.drop_operands()


@dataclass(frozen=True)
class _Product:
    """The product of `x` with the weights of every expert, and what is added to it."""

    x: Value
    weight: Value
    bias: Value | None


@dataclass
class _Mixture:
    """Matches what is between a dispatch and a combine; an Error says what is something else."""

    combine: MoeCombine
    inside: list[Op] = field(default_factory=list[Op])

    def fused(self) -> Experts:
        """The operation that computes the same, in no function yet."""
        combine = self.combine
        down = self._product(combine.buffer)
        hidden = down.x.producer
        attributes: dict[str, float] = {}
        sides = list(hidden.operands) if isinstance(hidden, Mul) else [down.x]
        acts = [op for value in sides if (op := value.producer) and act_of(op)]
        if not acts:
            raise Error(f"{_name(down.x)} is no activation, and no product of one")
        self.inside += [acts[0], *([hidden] if isinstance(hidden, Mul) else [])]
        gate, (active,) = None, acts[0].operands
        if isinstance(hidden, Mul):
            other = sides[1] if sides[0] is acts[0].result else sides[0]
            active, other, attributes = self._bounded(active, other)
            gate, up = self._product(active), self._product(other)
        else:
            up = self._product(active)
        dispatch = self._taken(up.x, MoeDispatch, "what experts multiply")
        self._check(dispatch, up, gate)
        return Experts(
            *(dispatch.x, combine.chosen, combine.slots, combine.weights, up.weight, down.weight),
            first=combine.first,
            gate=gate and gate.weight,
            gate_bias=gate and gate.bias,
            up_bias=up.bias,
            down_bias=down.bias,
            act=act_of(acts[0]) or "silu",
            parts=combine.parts,
            capacity=dispatch.capacity,
            **attributes,
        )

    def _check(self, dispatch: MoeDispatch, up: _Product, gate: _Product | None) -> None:
        if gate is not None and gate.x is not dispatch.result:
            raise Error("gate and up multiply different values")
        if up.weight.type.shape[0] != dispatch.experts:
            raise Error(f"the weights {up.weight.type} are not those of {dispatch.experts} experts")
        if any(getattr(dispatch, name) != getattr(self.combine, name) for name in _PAIRS):
            raise Error("dispatched and combined are different pairs")
        inside = {self.combine, *self.inside}
        for op in self.inside:
            if not inside.issuperset(op.results[0].users):
                raise Error(f"the result of {op.opname} is used elsewhere, too")

    def _taken(self, value: Value, kind: type[Kind], what: str) -> Kind:
        """The operation behind a value, which is of this kind and will be inside."""
        op = value.producer
        if not isinstance(op, kind):
            raise Error(f"{what} is {_name(value)}, not {kind.opname}")
        self.inside.append(op)
        return op

    def _product(self, value: Value) -> _Product:
        """The product behind a value [experts, places, outputs]."""
        if value.type.ndim != 3:
            raise Error(f"what experts give is {value.type}, not [experts, places, features]")
        bias, (experts, _, outputs) = None, value.type.shape
        if isinstance(total := value.producer, Add):
            self.inside.append(total)
            rows = [v.type.shape == (experts, 1, outputs) for v in total.operands]
            if not any(rows):
                raise Error(f"what is added is not a bias [{experts}, 1, {outputs}]")
            bias, value = total.operands[:: 1 if rows[0] else -1]
        product = self._taken(value, Matmul, "what experts give")
        weight = product.y.producer
        if not isinstance(weight, Transpose) or weight.order != (0, 2, 1):
            raise Error(f"the weights {_name(product.y)} are not [experts, outputs, inputs]")
        return _Product(product.x, weight.x, bias)

    def _bounded(self, gate: Value, up: Value) -> tuple[Value, Value, dict[str, float]]:
        """gate and up without the limits and the offset that attributes state."""
        offset = 0.0
        if isinstance(total := up.producer, Add):
            number = next((n for v in total.operands if (n := _number(v)) is not None), None)
            if number is not None:
                self.inside.append(total)
                offset, up = number, next(v for v in total.operands if _number(v) is None)
        high = gate.producer
        limit, inner = 0.0, gate
        if isinstance(high, Minimum):
            limit, inner = _number(high.y) or 0.0, high.x
        elif isinstance(high, Clip) and high.low is None:
            limit, inner = float(high.high or 0), high.x
        both = up.producer
        clipped = isinstance(both, Clip) and both.high == limit and both.low == -limit
        if limit <= 0 or not isinstance(both, Clip) or not clipped:
            return gate, up, {"offset": offset}
        self.inside += [both, *([high] if high else [])]
        return inner, both.x, {"offset": offset, "limit": limit}


def _number(value: Value) -> float | None:
    """The single number that a value is."""
    number = None if value.type.ndim else uniform(value)
    return None if number is None else float(number)


def _name(value: Value) -> str:
    op = value.producer
    return f"%{value.name or '_'}" if op is None else op.opname
