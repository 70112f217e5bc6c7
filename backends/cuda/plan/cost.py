"""What a step of a plan costs: bytes and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from irc.analysis.cost import cost_of
from irc.analysis.sizes import LocalSizes
from irc.ir.core import Op, Value
from irc.ir.mesh import Mesh
from irc.ops import FusedAttention
from irc.ops.fused_attention import cache_writes


@dataclass(frozen=True, eq=False)
class Work:
    """What a launch does, by the values that it reads and writes and its operations."""

    reads: Sequence[Value] = ()
    writes: Sequence[Value] = ()
    operations: Sequence[Op] = ()
    sizes: LocalSizes = field(default_factory=lambda: LocalSizes(Mesh(), {}))

    @property
    def nbytes(self) -> int:
        """The bytes that are read and written: of selected or updated elements only these."""
        total, operations, sizes = 0, self.operations, self.sizes
        for value in dict.fromkeys(self.reads):
            users = [op for op in operations if value in op.operands]
            whole = sizes.bytes(value.type)
            used = sum(_used(value, op, sizes) for op in users)
            total += min(whole, used) if users else whole
        total += sum(sizes.bytes(value.type) for value in _updated(operations))
        rows = {row.cache: (row.new, row.past) for op in operations for row in cache_writes(op)}
        for value in self.writes:
            kept = value.producer.overwrites().get(value) if value.producer is not None else None
            written = (value,) if kept is None else rows.get(kept, (value,))
            total += sum(sizes.bytes(value.type) for value in written)
        return total

    @property
    def flops(self) -> int:
        """The floating-point operations."""
        return round(sum(cost_of(op, self.sizes).flops for op in self.operations))


NONE = Work()


def _updated(operations: Sequence[Op]) -> dict[Value, None]:
    """The values that a launch updates in place and reads, such as a cache in attention."""
    updated = {value for op in operations if op.in_place for value in op.results}
    return {value: None for op in operations for value in op.operands if value in updated}


def _used(value: Value, op: Op, sizes: LocalSizes) -> int:
    """The bytes of a value that an operation reads."""
    if not isinstance(op, FusedAttention) and value in op.overwrites().values():
        return 0
    if op.selects and getattr(op, op.selects) is value:
        return sum(
            sizes.bytes(result.type.replace(dtype=value.type.dtype)) for result in op.results
        )
    return sizes.bytes(value.type)
