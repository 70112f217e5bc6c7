"""Which values lie in memory, and why; others are computed inside the kernels that use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from irc.ir.core import Function, Op, Value
from irc.ir.dims import product
from irc.ir.dtypes import is_float
from irc.ops.collective import Exchange

from .template import KERNELS

LARGEST = 64  # operations behind one element of a kernel
LIGHTEST = 24  # simple operations behind one element that is computed again and again


def has_kernel(op: Op) -> bool:
    """Whether the results of an operation come from launches of its own."""
    return type(op) in KERNELS or isinstance(op, Exchange)


def is_pointwise(op: Op) -> bool:
    """Whether element i of the result depends on elements i of operands of the same shape."""
    rule = type(op).sharding
    return rule is not None and set(rule.replace("->", ",").replace(" ", "").split(",")) == {"..."}


def is_simple(op: Op) -> bool:
    """Whether an element costs little more than those that it is made of.

    So do indices, masks and single numbers, which are not worth a launch.
    """
    if op.cheap or op.moves_data:
        return True
    type = op.results[0].type
    return is_pointwise(op) and (not is_float(type.dtype) or product(type.shape) == 1)


def view_of(value: Value) -> Value:
    """The value of whose memory this one is a view, or itself."""
    while (op := value.producer) is not None and op.is_view:
        value = op.operands[0]
    return value


@dataclass(frozen=True)
class Sinks:
    """The kernels that compute a value which is not stored; `same`: at one index each."""

    where: frozenset[Op | Value]
    same: bool


class Storage:
    """The stored values of a function, each with the reason.

    `live` are the operations that run by themselves, in order; `read` are the values that fused
    launches read, and `written` those that they write.
    """

    def __init__(
        self,
        function: Function,
        live: Sequence[Op],
        read: Collection[Value],
        written: Iterable[Value],
    ) -> None:
        self.reasons: dict[Value, str] = dict.fromkeys(written, "fused launches write it")
        self._live, self._read = dict.fromkeys(live), read
        self._returned = set(function.returned)
        self._weights: dict[Value, int] = {}
        self._sinks: dict[Value, Sinks] = {}
        for op in live:
            if has_kernel(op):
                continue  # its results are stored
            weight = LIGHTEST + 1
            if is_simple(op):
                weight = 1 + sum(self._weights.get(operand, 0) for operand in op.operands)
            self._weights |= dict.fromkeys(op.results, weight)
        for op in reversed(live):
            for value in op.results:
                if value not in self.reasons and (reason := self._reason(op, value)):
                    self.reasons[value] = reason
        self._limit()

    def is_light(self, value: Value) -> bool:
        """Whether an element may be computed again and again."""
        return self._weights.get(value, 0) <= LIGHTEST

    def _reason(self, op: Op, value: Value) -> str:
        """Why a value is stored, or nothing."""
        if has_kernel(op):
            return f"a kernel of {op.opname} writes it"
        if value in self._returned:
            return "it is returned"
        if value in self._read:
            return "fused launches read it"
        users = [user for user in value.users if user in self._live]
        for user in users:
            if reason := self._required(value, user):
                return reason
        sinks = _joined(self._through(user) for user in users)
        same = sinks.same and all(has_kernel(user) or _is_same(user, value) for user in users)
        where = sinks.where
        self._sinks[value] = Sinks(where, same)
        uses = sum(value.users[user] for user in users)
        if self.is_light(value) or uses < 2 or (same and len(where) == 1):
            return ""
        return f"{uses} uses" + (f" in {len(where)} kernels" if len(where) > 1 else "")

    def _required(self, value: Value, user: Op) -> str:
        """Why a use of the value needs it in memory, or nothing."""
        if isinstance(user, Exchange):
            return f"{user.opname} reads it"
        if user.is_view and user.results[0] in self.reasons:
            return "a view of it is stored"
        if value in user.overwrites().values():
            return f"{user.opname} writes into it"
        if self.is_light(value):
            return ""
        if user.reads == "many" and has_kernel(user):
            return f"{user.opname} reads each element several times"
        if has_kernel(user) or user.reads == "once" or _is_same(user, value):
            return ""
        counts = [product(result.type.shape) for result in user.results]
        if counts == [product(value.type.shape)]:
            return ""
        return f"{user.opname} reads each element several times"

    def _through(self, user: Op) -> Sinks:
        """The kernels that a use of a value is part of."""
        if has_kernel(user):
            return Sinks(frozenset([user]), True)
        return _joined(
            Sinks(frozenset([result]), True) if result in self.reasons else self._sinks[result]
            for result in user.results
            if result in self.reasons or result in self._sinks
        )

    def _limit(self) -> None:
        """Store what would make kernels too large; views of stored values are stored."""
        cost: dict[Value, int] = {}
        for op in self._live:
            if op.is_view and self._is_stored(op.operands[0]):
                self.reasons.setdefault(op.results[0], "a view of a stored value")
            total = 1 + sum(0 if self._is_stored(v) else cost.get(v, 0) for v in op.operands)
            for value in op.results:
                if total > LARGEST and not self._is_stored(value):
                    self.reasons[value] = f"more than {LARGEST} operations are behind it"
                cost[value] = total

    def _is_stored(self, value: Value) -> bool:
        return value.producer is None or value in self.reasons


def _is_same(user: Op, value: Value) -> bool:
    return is_pointwise(user) and user.results[0].type.shape == value.type.shape


def _joined(sinks: Iterable[Sinks]) -> Sinks:
    every = list(sinks)
    where = frozenset[Op | Value]().union(*(some.where for some in every))
    return Sinks(where, all(some.same for some in every))


def leaves(value: Value, ends: Callable[[Value], bool]) -> tuple[dict[Value, None], dict[Op, None]]:
    """(the values behind a value, where it ends, the operations in between)."""
    behind: dict[Value, None] = {}
    between: dict[Op, None] = {}
    work = [value]
    while work:
        value = work.pop()
        op = value.producer
        if op is None or ends(value):
            behind[value] = None
        elif op not in between:
            between[op] = None
            work += op.operands
    return behind, between
