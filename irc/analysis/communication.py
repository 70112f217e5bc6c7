"""The communication of a module: every collective with its bytes and its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.core import Function, Op
from ..ir.mesh import Mesh
from ..ir.types import Axes
from ..ops.collective import Collective, mesh_axes
from ..source import Loc
from .cost import operations
from .fused import collectives, communicates
from .sizes import LocalSizes
from .topology import KINDS, Topology, sent

_CANDIDATES = {"sharded_topk": "all_gather", "sharded_max": "all_reduce"}


@dataclass(frozen=True)
class Message:
    """One collective of one run of a function, or a transfer between pipeline stages.

    `size` is the bytes of the global tensor (see `topology.sent`), `sent` the bytes that one rank
    sends, `us` the time over `link`. `axis` is the mesh axis, as in the operation.
    """

    kind: str
    axis: str
    group_size: int
    size: int
    sent: float
    us: float
    link: str
    loc: Loc | None = None


def kind_of(op: Op) -> str | None:
    """The name in `KINDS` of a collective, None for other operations."""
    name = op.opname.removeprefix("collective_")
    return name if isinstance(op, Collective) and name in KINDS else None


def whole_bytes(kind: str, group_size: int, operand: int) -> int:
    """`size` of a collective from the bytes of one rank's operand."""
    return operand * group_size if kind in ("all_gather", "gather") else operand


def messages(function: Function, sizes: LocalSizes, topology: Topology) -> list[Message]:
    """Every collective of one run of the function, in order; of either view.

    Operations of the global view that localize lowers to several, such as cyclic_embedding, are
    counted in the local view only; of sharded_topk and sharded_max it is known what is sent.
    """
    return [each for op in operations(function) for each in messages_of(op, sizes, topology)]


def messages_of(op: Op, sizes: LocalSizes, topology: Topology) -> list[Message]:
    """The collectives of one operation, see `messages`."""
    if communicates(op):
        return [_of(part, sizes, topology) for part in collectives(op) if kind_of(part)]
    return _of_candidates(op, sizes, topology) if op.opname in _CANDIDATES else []


def _of(op: Collective, sizes: LocalSizes, topology: Topology) -> Message:
    kind = str(kind_of(op))
    return message(kind, op.axes, sizes.bytes(op.operands[0].type), sizes.mesh, topology, op.loc)


def _of_candidates(op: Op, sizes: LocalSizes, topology: Topology) -> list[Message]:
    axes, kind = mesh_axes(op.opname, op.attributes["axis"]), _CANDIDATES[op.opname]
    candidates = [sizes.bytes(result.type) for result in op.results]
    return [message(kind, axes, n, sizes.mesh, topology, op.loc) for n in candidates]


def message(
    kind: str, axes: Axes, operand: int, mesh: Mesh, topology: Topology, loc: Loc | None = None
) -> Message:
    """The message of a collective over mesh axes, of which one rank gives `operand` bytes."""
    group_size = mesh.group_size(axes)
    size = whole_bytes(kind, group_size, operand)
    link = slowest_link(mesh.groups(axes), topology)
    us = topology.time(kind, group_size, size, link)
    return Message(
        kind, ".".join(axes), group_size, size, sent(kind, group_size, size), us, link, loc
    )


def slowest_link(groups: Sequence[Sequence[int]], topology: Topology) -> str:
    """The link that the ranks of a group need: the one between hosts if any group spans two."""
    links = [topology.link_of(group) for group in groups]
    return topology.between if topology.between in links else topology.within
