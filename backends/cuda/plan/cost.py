"""What a step of a plan costs: bytes, arithmetic and expected time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from irc.analysis.communication import message
from irc.analysis.cost import cost_of
from irc.analysis.sizes import LocalSizes
from irc.analysis.topology import Topology
from irc.ir.core import Op, Value
from irc.ir.mesh import Mesh

from .core import LibraryCall, Plan, Step, pointers


def bytes_of(
    reads: Iterable[Value], writes: Iterable[Value], operations: Iterable[Op], sizes: LocalSizes
) -> int:
    """The bytes that a launch reads and writes: of selected or updated elements only these."""
    operations = list(operations)
    total = 0
    for value in dict.fromkeys(reads):
        users = [op for op in operations if value in op.operands]
        whole = sizes.bytes(value.type)
        used = sum(_used(value, op, sizes) for op in users)
        total += min(whole, used) if users else whole
    total += sum(sizes.bytes(value.type) for value in _updated(operations))
    for value in writes:
        op = value.producer
        kept = None if op is None or not op.in_place else getattr(op, op.in_place)
        others = [] if op is None else [v for v in op.operands if v is not kept]
        part = sum(sizes.bytes(v.type) for v in others)
        total += sizes.bytes(value.type) if kept is None else part
    return total


def _updated(operations: Sequence[Op]) -> dict[Value, None]:
    """The values that a launch updates in place and reads, such as a cache in attention."""
    made = {value for op in operations if op.in_place for value in op.results}
    return {value: None for op in operations for value in op.operands if value in made}


def _used(value: Value, op: Op, sizes: LocalSizes) -> int:
    """The bytes of a value that an operation reads."""
    if op.in_place and getattr(op, op.in_place) is value:
        return 0
    if op.selects and getattr(op, op.selects) is value:
        return sum(
            sizes.bytes(result.type.replace(dtype=value.type.dtype)) for result in op.results
        )
    return sizes.bytes(value.type)


def flops_of(operations: Iterable[Op], sizes: LocalSizes) -> int:
    """The floating-point operations of a launch."""
    return round(sum(cost_of(op, sizes).flops for op in operations))


def microseconds(plan: Plan, step: Step, topology: Topology, mesh: Mesh) -> float:
    """The expected time of a step, the start of its kernel included."""
    device, buffers = topology.device, [plan.buffers[each.buffer] for each in pointers(step)]
    if isinstance(step, LibraryCall) and step.library == "nccl":
        return message(step.function, step.axes, buffers[0].nbytes, mesh, topology).us
    peak = device.peak(buffers[-1].dtype if buffers else "f32")
    return max(step.flops / peak, step.nbytes / device.hbm_gb_s / 1e3) + device.kernel_us
