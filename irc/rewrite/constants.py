"""`uniform`: the number that a `constant` or `full` operation repeats."""

from __future__ import annotations

from typing import cast

from ..ir.attributes import Number
from ..ir.core import Value


def uniform(value: Value) -> Number | None:
    """The number that a `constant` or `full` repeats, None for any other value."""
    producer = value.producer
    if producer is None:
        return None
    if producer.opname == "full":
        return cast("Number", producer.attributes["value"])
    if producer.opname != "constant":
        return None
    values = cast("tuple[Number, ...]", producer.attributes["values"])
    if not values or any(repr(v) != repr(values[0]) for v in values[1:]):
        return None
    return values[0]
