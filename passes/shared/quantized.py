"""Values seen through the operations that quantize them."""

from __future__ import annotations

from irc.ir.core import Op, Value
from irc.ops import Dequantize, DynamicScale, Full, Quantize


def rounded(value: Value) -> Value:
    """What the uses of a value see: itself, or what quantize and dequantize leave of it."""
    quantizers = [user for user in value.users if not isinstance(user, DynamicScale)]
    if len(quantizers) != 1 or not isinstance(quantizers[0], Quantize):
        return value
    codes = quantizers[0].result
    readers = [user for user in codes.users if isinstance(user, Dequantize) and user.x is codes]
    return readers[0].result if len(codes.users) == len(readers) == 1 else value


def has_one_scale(op: Op) -> bool:
    """Whether an operation quantizes or dequantizes a complete tensor by one constant scale."""
    return isinstance(op, (Quantize, Dequantize)) and isinstance(op.scale.producer, Full)
