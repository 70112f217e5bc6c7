"""Constants: the number that one repeats, and what an operation gives for them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ..ir.attributes import Number
from ..ir.core import Op, Value
from ..ir.dtypes import numpy_dtype


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


def evaluated(op: Op, arrays: list[Any]) -> Any:
    """The only result of an operation for arrays of its operands, narrow floats in f32."""
    fixed = len(arrays) - len(op.present)
    named = dict(zip(op.present, arrays[fixed:], strict=True))
    result = op.evaluate(*arrays[:fixed], *[named.get(name) for name in op.optional_names])
    return np.asarray(result).astype(numpy_dtype(op.result.type.dtype))
