"""Statistics of a module."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..ir.core import Module, Weight
from ..ir.dims import Dim, product
from ..ir.dtypes import dtype


def statistics(module: Module) -> dict[str, Any]:
    """Counts of operations, weights and parameters, as plain numbers and dicts of numbers."""
    ops = Counter(op.opname for op in module.ops())
    weights = list(module.weights.values())
    return {
        "name": module.name,
        "functions": len(module.functions),
        "operations": ops.total(),
        "weights": len(weights),
        "parameters": sum(_elements(weight) for weight in weights),
        "weight_bytes": weight_bytes(module),
        "by_operation": dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
    }


def weight_bytes(module: Module) -> int:
    """The bytes of all weights; in the local view, of those of one rank."""
    return sum(bytes_of(weight) for weight in module.weights.values())


def _elements(weight: Weight) -> int:
    count = product(weight.type.shape)
    return 0 if isinstance(count, Dim) else count


def bytes_of(weight: Weight) -> int:
    """The bytes of a weight, of a local one those of one rank."""
    return dtype(weight.type.dtype).nbytes(_elements(weight))
