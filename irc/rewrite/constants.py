"""Reading numbers back from `constant` and `full`."""

from __future__ import annotations

from typing import cast

from ..attributes import Number
from ..core import Value


def uniform(value: Value) -> Number | None:
    """The one number that a `constant` or `full` repeats, or None for any other value."""
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
