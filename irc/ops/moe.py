"""Mixture of experts: tokens are grouped by expert, and the experts' results combined.

A router chooses K of E experts for every token. `moe_slots` numbers the tokens of each expert,
`moe_dispatch` copies tokens into a buffer with one matrix per expert, and `moe_combine` adds up the
results of the experts of a token. The tokens may be in `parts`, numbered separately: where they are
sharded over as many ranks, a rank needs no other rank for this, and an all_to_all of the buffer
brings every expert its tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Module, Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, optional, placeholder
from ..ir.dims import Dim, DimLike, exact_divide
from ..ir.types import TensorType
from .control import Full, Iota
from .elementwise import Add, Mul, Sub
from .logic import And, Cast, Ge, Lt, Where
from .lookup import Embedding, OneHot, ScatterElements, check_bounds
from .matmul import Matmul
from .parts import Slice
from .reduce import Cumsum, ReduceSum
from .shape import Expand, Reshape, Squeeze, Unsqueeze
from .shapes import float_operand, index_operand, run_sizes, same_dtype, shape_text

Array: TypeAlias = Any  # a numpy array


class Routed(Op):
    """Base of the operations on pairs of token and expert [T, K], with tokens in `parts`."""

    __slots__ = ()
    part_dim: ClassVar[int] = 0  # the dimension of the result that the parts divide
    chosen: Operand
    parts: int

    @property
    def token_word(self) -> str:
        """The name of the token dimension in the rule; it cannot be sharded without parts."""
        return "t" if self.parts > 1 else "t!"

    def local_rule(self) -> str | None:
        """One rank has all tokens of its parts."""
        view = placeholder(self, self.operands)
        assert isinstance(view, Routed)
        view.parts = max(2, self.parts)
        return view.sharding_rule()

    def pairs(self) -> tuple[DimLike, DimLike, DimLike]:
        """(tokens, choices of each, tokens of a part)."""
        type = index_operand(self.opname, self.chosen)
        if type.ndim != 2:
            raise Error(f"{self.opname} takes chosen [tokens, choices], not {type}")
        if self.parts < 1:
            raise Error(f"{self.opname}: parts is {self.parts}, but it must be at least 1")
        tokens, choices = type.shape
        part = exact_divide(tokens, self.parts)
        if part is None:
            raise Error(
                f"{self.opname}: {tokens} tokens cannot be divided into {self.parts} equal parts; "
                "pad them first"
            )
        return tokens, choices, part

    def paired(self, name: str, value: Value) -> TensorType:
        """The type of an operand that has an entry per pair."""
        if value.type.shape != self.chosen.type.shape:
            raise Error(
                f"{self.opname}: {name} is {value.type}, but chosen is {self.chosen.type}: "
                "both have an entry per token and choice"
            )
        return value.type

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        """The attributes of one rank, which has a shard of the tokens, or of the slots for them.

        Every rank gets as many parts.
        """
        total, local = (type.shape[self.part_dim] for type in (self.result.type, results[0]))
        if self.parts == 1 or total == local:
            return self.attributes
        for group_size in range(2, self.parts + 1):
            if local * group_size == total and self.parts % group_size == 0:
                return self.attributes | {"parts": self.parts // group_size}
        raise Error(
            f"{self.opname}: its {self.parts} parts cannot be shared by ranks that have "
            f"{local} of {total}; parts is a multiple of the ranks"
        )

    def verify(self, module: Module) -> None:
        """Every rank gets as many parts."""
        axes = self.chosen.type.axes[0]
        group_size = module.mesh.group_size(axes) if axes else 1
        if self.parts % group_size:
            raise Error(
                f"{self.opname}: the tokens are sharded over {'.'.join(axes)}, which has "
                f"{group_size} ranks, so parts must be a multiple of {group_size}, not {self.parts}"
            )


def _check_experts(op: str, experts: int, capacity: DimLike) -> None:
    if experts < 1:
        raise Error(f"{op}: experts is {experts}, but it must be at least 1")
    if not isinstance(capacity, Dim) and capacity < 0:
        raise Error(f"{op}: capacity cannot be negative; 0 is no limit")


def _check_first(op: str, first: Value | None) -> None:
    if first is not None and index_operand(op, first).ndim != 0:
        raise Error(f"{op}: first is the number of one expert, i32[], not {first.type}")


@operation("moe_slots", reads="many")
class MoeSlots(Routed):
    """The slot of every token at each expert that it chose, -1 where it is dropped: i32 [T, K].

    chosen [T, K]: K different experts per token, by number from 0 to `experts` - 1. The tokens are
    `parts` equal parts in a row, each with slots of its own. A pair of a token and a choice gets
    the next slot of its part and expert, from 0, in the order of tokens and, for one token, of
    choices. An expert has `capacity` slots per part; 0 is as many as a part has tokens. A pair
    beyond the capacity, or with a number that is no expert, gets -1: reduce_sum of slots < 0 counts
    the dropped pairs. Lepikhin et al., 2020.
    """

    chosen: Operand
    experts: int
    parts: int = 1
    capacity: DimLike = 0

    def sharding_rule(self) -> str:
        return f"{self.token_word} k! -> t k"

    def expand(self) -> Op:
        tokens, choices, part = self.pairs()
        _check_experts(self.opname, self.experts, self.capacity)
        pairs = Reshape(_i32(self.chosen), shape=(self.parts, part * choices))
        hits = OneHot(pairs, size=self.experts, dtype="i32")
        # a pair meets itself in the running count of its expert; one without an expert counts 0
        count = ReduceSum(Mul(hits, Cumsum(hits, dim=1)), dims=(2,))
        place = Sub(count, _number(1))
        fits = Lt(place, _number(self.capacity or part))
        slots = Where(fits, place, _number(-1))
        return Reshape(slots, shape=(tokens, choices))

    def evaluate(self, chosen: Array) -> Array:
        (capacity,) = run_sizes(self.opname, (self.capacity,))
        queued = chosen.reshape(self.parts, chosen.size // self.parts)
        slots: Array = np.full(queued.shape, -1, np.int32)
        for expert in range(self.experts):
            mine = queued == expert
            place = np.cumsum(mine, axis=1) - 1
            slots[mine] = place[mine]
        slots[slots >= (capacity or chosen.shape[0] // self.parts)] = -1
        return slots.reshape(chosen.shape)


@operation("moe_dispatch", sums="x", safe_values={"slots": -1}, reads="many")
class MoeDispatch(Routed):
    """Every token in its slots of the experts, zeros in empty slots: [experts, parts*C, H].

    x [T, H]; chosen and slots [T, K] of moe_slots, with its `parts` and `capacity`. C is the
    capacity, or T/parts where that is 0: token t is at [chosen[t, k], part*C + slots[t, k]]. With
    `first` i32[] the buffer holds the experts from that number on, without the tokens of others. A
    slot beyond the capacity is an error at run time; which of two tokens in one slot remains is
    undefined.
    """

    part_dim: ClassVar = 1
    x: Operand
    chosen: Operand
    slots: Operand
    experts: int
    first: OptionalOperand = optional()
    parts: int = 1
    capacity: DimLike = 0

    def sharding_rule(self) -> str:
        t = self.token_word
        return f"{t} h, {t} k, {t} k, -> 1 t h"

    def expand(self) -> Op:
        tokens, choices, part = self.pairs()
        x = float_operand(self.opname, self.x)
        if x.ndim != 2 or x.shape[0] != tokens:
            raise Error(f"moe_dispatch: x is {x}, but chosen {self.chosen.type}: not one row each")
        _check_experts(self.opname, self.experts, self.capacity)
        places = (self.capacity or part) * self.parts
        row = _rows(self, self.slots, self.first, self.experts, places)
        total, count = places * self.experts, tokens * choices
        row = Reshape(row, shape=(count,))
        # pairs without a slot are written behind the buffer, each to a row of its own
        spare = Slice(Iota(size=total + count), dim=0, start=total, stop=total + count)
        target = Where(Lt(row, _number(0)), spare, row)
        token = Expand(Unsqueeze(Iota(size=tokens), dims=(1,)), shape=(tokens, choices))
        empty = Full(value=-1, shape=(total + count,), dtype="i32")
        source = ScatterElements(empty, target, Reshape(token, shape=(count,)), dim=0)
        source = Slice(source, dim=0, start=0, stop=total)
        return Embedding(Reshape(source, shape=(self.experts, places)), self.x)

    def evaluate(self, x: Array, chosen: Array, slots: Array, first: Array = None) -> Array:
        (capacity,) = run_sizes(self.opname, (self.capacity,))
        places = (capacity or len(chosen) // self.parts) * self.parts
        expert, place, has_place = _places(self, chosen, slots, first, self.experts, places)
        buffer = np.zeros((self.experts, places, x.shape[1]), x.dtype)
        buffer[expert, place] = x[np.nonzero(has_place)[0]]
        return buffer


@operation("moe_combine", sums="buffer | weights", safe_values={"slots": -1}, reads="many")
class MoeCombine(Routed):
    """Per token, the weighted sum of its experts' results: [T, H].

    buffer [E, parts*C, H] in the layout of moe_dispatch; chosen and slots [T, K] as for that;
    weights [T, K] of the dtype of the buffer. Result: the sum over k of weights[t, k] *
    buffer[chosen[t, k], part*C + slots[t, k]]; a pair that was dropped adds nothing. With `first`
    i32[] the buffer holds the experts from that number on, and pairs of others add nothing: the
    results of ranks that hold some of the experts each add up to the complete one. Experts that no
    token chose may follow, as padding.
    """

    buffer: Operand
    chosen: Operand
    slots: Operand
    weights: Operand
    first: OptionalOperand = optional()
    parts: int = 1

    def sharding_rule(self) -> str:
        t = self.token_word
        return f"e~ {t} h, {t} k, {t} k, {t} k, -> t h"

    def expand(self) -> Op:
        self.pairs()
        buffer = float_operand(self.opname, self.buffer)
        same_dtype(self.opname, self.buffer, self.weights)
        self.paired("weights", self.weights)
        if buffer.ndim != 3:
            raise Error(f"moe_combine takes a buffer [experts, places, width], not {buffer}")
        experts, places, width = buffer.shape
        if exact_divide(places, self.parts) is None:
            raise Error(
                f"moe_combine: the buffer {shape_text(buffer.shape)} has {places} places per "
                f"expert, which are not {self.parts} equal parts"
            )
        row = _rows(self, self.slots, self.first, experts, places)
        rows = Embedding(row, Reshape(self.buffer, shape=(experts * places, width)))
        return Squeeze(Matmul(Unsqueeze(self.weights, dims=(1,)), rows), dims=(1,))

    @np.errstate(all="ignore")
    def evaluate(
        self, buffer: Array, chosen: Array, slots: Array, weights: Array, first: Array = None
    ) -> Array:
        experts, places, width = buffer.shape
        expert, place, has_place = _places(self, chosen, slots, first, experts, places)
        rows = np.zeros((*chosen.shape, width), buffer.dtype)
        rows[has_place] = buffer[expert, place]
        return np.sum(weights[..., None] * rows, axis=1, dtype=buffer.dtype)


def _i32(value: Value) -> Value | Op:
    return value if value.type.dtype == "i32" else Cast(value, dtype="i32")


def _number(size: DimLike) -> Op:
    """A size as i32[], also where it is known at run time only."""
    if isinstance(size, Dim):
        return ReduceSum(Full(value=1, shape=(size,), dtype="i32"), dims=(0,))
    return Full(value=size, dtype="i32")


def _rows(op: Routed, slots: Value, first: Value | None, experts: DimLike, places: DimLike) -> Op:
    """Which row of a buffer [experts * places, H] each pair has; -1 where none: i32 [T, K]."""
    _check_first(op.opname, first)
    index_operand(op.opname, slots)
    op.paired("slots", slots)
    tokens, _, part = op.pairs()
    expert, slot = _i32(op.chosen), _i32(slots)
    if first is not None:
        expert = Sub(expert, _i32(first))
    held = And(Ge(expert, _number(0)), Lt(expert, _number(experts)))
    row = Add(Mul(expert, _number(places)), slot)
    if op.parts > 1:
        number = Expand(Unsqueeze(Iota(size=op.parts), dims=(1,)), shape=(op.parts, part))
        begin = Mul(Reshape(number, shape=(tokens, 1)), _number(places // op.parts))
        row = Add(row, begin)
    return Where(And(held, Ge(slot, _number(0))), row, _number(-1))


def _places(
    op: Routed, chosen: Array, slots: Array, first: Array, experts: int, places: int
) -> tuple[Array, Array, Array]:
    """(expert and place of every pair that the buffer holds, which pairs those are)."""
    check_bounds(op.opname, np.maximum(slots, 0), max(1, places // op.parts))
    expert = chosen if first is None else chosen - first
    has_place = (slots >= 0) & (expert >= 0) & (expert < experts)
    part = np.arange(len(chosen)) // max(1, len(chosen) // op.parts)
    place = part[:, None] * (places // op.parts) + slots
    return expert[has_place], place[has_place], has_place
