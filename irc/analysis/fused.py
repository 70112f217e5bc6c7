"""Whether operations communicate: collectives, and operations fused with one."""

from __future__ import annotations

from ..ir.core import Op
from ..ir.expansion import expansion
from ..ops.collective import Collective


def is_fused(op: Op) -> bool:
    """Whether an operation expands into a collective and others: it has a `group_size`."""
    return op.composite and "group_size" in op.attribute_types


def communicates(op: Op) -> bool:
    """Whether an operation communicates; `rank` does not."""
    return is_fused(op) or (isinstance(op, Collective) and bool(op.operands))


def is_repeatable(op: Op) -> bool:
    """Whether a rank alone gets the same results from the same operands, at any time."""
    alone = not isinstance(op, Collective) and not is_fused(op)
    return op.pure and alone and op.opname != "call"


def collectives(op: Op) -> list[Collective]:
    """The collectives of an operation that communicates."""
    parts = expansion(op).ops if is_fused(op) else (op,)
    return [part for part in parts if isinstance(part, Collective)]
