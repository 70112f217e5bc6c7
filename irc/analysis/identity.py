"""Keys that identify the same communication in the modules of different ranks."""

from __future__ import annotations

from ..ir.core import Op, Value, Weight
from ..text.printer import attributes_text
from .events import Event


class Identity:
    """Keys of events, equal where location, kind and the computation before are equal."""

    def __init__(self) -> None:
        self._digests: dict[Value, int] = {}

    def of(self, event: Event) -> tuple[object, ...]:
        """The key of an event."""
        return (event.place, event.kind, self._op(event.op))

    def _op(self, op: Op) -> int:
        """A number for what an operation computes, within its function."""
        waiting = [op]
        while waiting:
            last = waiting[-1]
            missing = [v.producer for v in last.operands if v not in self._digests]
            ops = [made for made in missing if made is not None]
            if ops:
                waiting += ops
                continue
            for value in last.operands:
                if value.producer is None:
                    self._digests[value] = _leaf(value)
            digest = hash((last.opname, *self._given(last)))
            for result in last.results:
                self._digests[result] = hash((digest, result.index))
            waiting.pop()
        return hash((op.opname, *self._given(op)))

    def _given(self, op: Op) -> tuple[object, ...]:
        return (attributes_text(op), op.present, *(self._digests[v] for v in op.operands))


def _leaf(value: Value) -> int:
    return hash((isinstance(value, Weight), value.name, value.index))
