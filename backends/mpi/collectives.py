"""How collectives along dimension 0 are made of messages: who sends what to whom, what is added.

All messages of a round go directly from rank to rank, as few ranks take part. Reductions add in
the order of the group, so that every rank and every algorithm finds the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from irc.backends.mpi.calls import ExchangeCall
from irc.backends.ranks.combine import reduce_parts

Array: TypeAlias = np.ndarray[Any, Any]
Pairs: TypeAlias = list[tuple[int, Array]]

# Bytes that a rank would receive by sending whole operands around, up to which it does: above,
# each rank reduces one part and hands that on, which moves less and takes a round more.
WHOLE = 512 << 10


@dataclass
class Round:
    """Arrays that go to other ranks and come from them, at the same time; all of them flat."""

    outgoing: Pairs = field(default_factory=list[tuple[int, Array]])
    incoming: Pairs = field(default_factory=list[tuple[int, Array]])


class Scratch:
    """Memory for what arrives before it is added up; it grows and stays."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def parts(self, count: int, size: int, dtype: np.dtype[Any]) -> list[Array]:
        """`count` flat arrays of `size` elements."""
        each = size * dtype.itemsize
        if self._memory.size < count * each:
            self._memory = np.empty(count * each, np.uint8)
        starts = range(0, count * each, each) if each else [0] * count
        return [self._memory[start : start + each].view(dtype) for start in starts]


def rounds(call: ExchangeCall, operand: Array, result: Array, scratch: Scratch) -> Iterator[Round]:
    """The rounds of a collective; after the last one is done, `result` is. Arrays are flat."""
    return _ALGORITHMS[call.what.operation](call, operand, result, scratch)


def _all_reduce(
    call: ExchangeCall, operand: Array, result: Array, scratch: Scratch
) -> Iterator[Round]:
    ways = len(call.group)
    if operand.nbytes * (ways - 1) <= WHOLE:
        slots = scratch.parts(ways - 1, operand.size, call.dtype)
        yield Round([(rank, operand) for rank in call.others], _pairs(call, slots))
        _fold(call, operand, slots, result)
        return
    given, made = _shares(operand, ways), _shares(result, ways)
    own = made[call.position]
    slots = scratch.parts(ways - 1, own.size, call.dtype)
    yield Round(_others(call, given), _pairs(call, slots))
    _fold(call, given[call.position], slots, own)
    yield Round([(rank, own) for rank in call.others], _others(call, made))


def _reduce_scatter(
    call: ExchangeCall, operand: Array, result: Array, scratch: Scratch
) -> Iterator[Round]:
    given = _shares(operand, len(call.group))
    slots = scratch.parts(len(call.others), result.size, call.dtype)
    yield Round(_others(call, given), _pairs(call, slots))
    _fold(call, given[call.position], slots, result)


def _reduce(call: ExchangeCall, operand: Array, result: Array, scratch: Scratch) -> Iterator[Round]:
    if not _is_root(call):
        yield Round([(_root(call), operand)])
        result[...] = 0
        return
    slots = scratch.parts(len(call.others), operand.size, call.dtype)
    yield Round(incoming=_pairs(call, slots))
    _fold(call, operand, slots, result)


def _all_gather(
    call: ExchangeCall, operand: Array, result: Array, scratch: Scratch
) -> Iterator[Round]:
    made = _shares(result, len(call.group))
    made[call.position][...] = operand
    yield Round([(rank, operand) for rank in call.others], _others(call, made))


def _gather(call: ExchangeCall, operand: Array, result: Array, scratch: Scratch) -> Iterator[Round]:
    if not _is_root(call):
        yield Round([(_root(call), operand)])
        result[...] = 0
        return
    made = _shares(result, len(call.group))
    made[call.position][...] = operand
    yield Round(incoming=_others(call, made))


def _all_to_all(
    call: ExchangeCall, operand: Array, result: Array, scratch: Scratch
) -> Iterator[Round]:
    given, made = _shares(operand, len(call.group)), _shares(result, len(call.group))
    made[call.position][...] = given[call.position]
    yield Round(_others(call, given), _others(call, made))


def _broadcast(
    call: ExchangeCall, operand: Array, result: Array, scratch: Scratch
) -> Iterator[Round]:
    if not _is_root(call):
        yield Round(incoming=[(_root(call), result)])
        return
    result[...] = operand
    yield Round([(rank, operand) for rank in call.others])


def _scatter(
    call: ExchangeCall, operand: Array, result: Array, scratch: Scratch
) -> Iterator[Round]:
    if not _is_root(call):
        yield Round(incoming=[(_root(call), result)])
        return
    given = _shares(operand, len(call.group))
    result[...] = given[call.position]
    yield Round(_others(call, given))


_ALGORITHMS: dict[str, Callable[[ExchangeCall, Array, Array, Scratch], Iterator[Round]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
}


def _root(call: ExchangeCall) -> int:
    return call.group[call.what.root]


def _is_root(call: ExchangeCall) -> bool:
    return call.what.root == call.position


def _shares(array: Array, ways: int) -> list[Array]:
    """A flat array in as many parts, equal or nearly so."""
    size = array.size
    return [array[i * size // ways : (i + 1) * size // ways] for i in range(ways)]


def _others(call: ExchangeCall, parts: Sequence[Array]) -> Pairs:
    """The parts of the other ranks, given those of all."""
    return [(rank, parts[i]) for i, rank in enumerate(call.group) if i != call.position]


def _pairs(call: ExchangeCall, slots: Sequence[Array]) -> Pairs:
    return list(zip(call.others, slots, strict=True))


def _fold(call: ExchangeCall, own: Array, slots: Sequence[Array], out: Array) -> None:
    """Combine the parts of all ranks in the order of the group."""
    parts = [*slots[: call.position], own, *slots[call.position :]]
    reduce_parts(call.what.reduce_op, parts, out)
