"""Which operations communicate: collectives, and what is fused with one."""

from __future__ import annotations

from ..core import Op
from ..expansion import expansion
from ..ops.collective import Collective


def is_fused(op: Op) -> bool:
    """Whether an operation expands into a collective and more; such a one has `axis` and `ways`."""
    return op.composite and "ways" in op.attribute_types


def communicates(op: Op) -> bool:
    """Whether the ranks have to meet for it; for `rank` they do not."""
    return is_fused(op) or (isinstance(op, Collective) and bool(op.operands))


def collectives(op: Op) -> list[Collective]:
    """What an operation that communicates consists of, without the rest."""
    parts = expansion(op).ops if is_fused(op) else (op,)
    return [part for part in parts if isinstance(part, Collective)]
