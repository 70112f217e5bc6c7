"""Which values hold no infinity, whatever the inputs of a model are."""

from __future__ import annotations

import math

from irc.core import Value
from irc.dtypes import is_float

_DEPTH = 16
_NORMS = frozenset(["rms_norm", "layer_norm", "group_norm", "all_reduce_rms_norm"])
_BETWEEN = frozenset(["softmax", "sigmoid", "tanh", "erf", "sin", "cos", "sign", "one_hot"])
# What gives numbers of its operands, or smaller ones.
_KEEP = frozenset(
    [
        "abs",
        "neg",
        "relu",
        "silu",
        "gelu",
        "quick_gelu",
        "maximum",
        "minimum",
        "where",
        "rope",
        "reshape",
        "transpose",
        "expand",
        "squeeze",
        "unsqueeze",
        "slice",
        "split",
        "concat",
        "stack",
        "flip",
        "repeat",
        "gather",
        "gather_elements",
        "all_gather",
        "all_to_all",
        "shard_slice",
        "broadcast",
    ]
)


def is_bounded(value: Value, depth: int = _DEPTH) -> bool:
    """Whether a value is nowhere infinite; NaN it may be."""
    if not is_float(value.type.dtype):
        return True
    op = value.producer
    if op is None or depth == 0:
        return False
    if op.opname in _NORMS:
        return op.attributes["eps"] > 0 and value is op.results[0]
    if op.opname == "constant":
        return all(math.isfinite(number) for number in op.attributes["values"])
    if op.opname == "full":
        return math.isfinite(op.attributes["value"])
    if op.opname in _BETWEEN:
        return True
    return op.opname in _KEEP and all(is_bounded(v, depth - 1) for v in op.operands)
