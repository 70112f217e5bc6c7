"""Whether operations communicate: collectives, and operations fused with one."""

from __future__ import annotations

from ..ir.core import Op
from ..ir.expansion import expansion
from ..ops.collective import Collective


def is_fused(op: Op) -> bool:
    """Whether an operation expands into a collective and others: it names the mesh axes."""
    return op.composite and bool(op.attributes.get("axis"))


def communicates(op: Op) -> bool:
    """Whether an operation communicates; `rank` does not."""
    return is_fused(op) or (isinstance(op, Collective) and bool(op.operands))


def is_repeatable(op: Op) -> bool:
    """Whether a rank alone gets the same results from the same operands, at any time."""
    alone = not isinstance(op, Collective) and not is_fused(op)
    return op.pure and alone and op.opname != "call"


def collectives(op: Op) -> list[Collective]:
    """The collectives of an operation that communicates."""
    if not is_fused(op):
        return [op] if isinstance(op, Collective) else []
    return [inner for part in expansion(op).ops for inner in collectives(part)]
