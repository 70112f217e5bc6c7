"""Values that are cheaper to compute again than to send to another stage."""

from __future__ import annotations

from irc.analysis.cost import cost_of
from irc.analysis.fused import is_repeatable
from irc.analysis.sizes import LocalSizes
from irc.ir.core import Function, Op, Value

FLOPS_PER_BYTE = 200  # arithmetic in the time of a byte from memory (H200: 990 TFLOP/s, 4.8 TB/s)
LINK = 10  # bytes from memory in the time of a byte from another device (H200: NVLink, 450 GB/s)


def recomputed(function: Function, sizes: LocalSizes) -> dict[Op, None]:
    """The operations that every stage runs for itself, in order: positions, masks, constants.

    They depend on arguments and numbers alone, not on weights, states or other ranks, and reading
    the arguments and running all that leads to a result takes less time than handing it over.
    """
    states = {function.args[at] for at in function.aliases().values()}
    arguments = [arg for arg in function.args if arg not in states]
    price: dict[Value, float] = {arg: sizes.bytes(arg.type) for arg in arguments}
    cheap: dict[Op, None] = {}
    for op in function:
        if not is_repeatable(op) or any(value not in price for value in op.operands):
            continue
        own = sum(sizes.bytes(result.type) for result in op.results)
        total = _own_price(op, own, sizes) + sum(price[v] for v in dict.fromkeys(op.operands))
        if total > LINK * own:
            continue
        cheap[op] = None
        price |= dict.fromkeys(op.results, total)
    return cheap


def _own_price(op: Op, written: int, sizes: LocalSizes) -> float:
    """The bytes from memory that take as long; what reads one another's results is one kernel."""
    cost = cost_of(op, sizes)
    return written + cost.flops / FLOPS_PER_BYTE if cost.kernels else 0.0
