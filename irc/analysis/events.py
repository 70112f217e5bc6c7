"""The communications of every rank of a local module, in order, without running it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import Error
from ..ir.core import Function, Module, Op, Value
from ..ir.dims import DimLike, exact_divide, product
from ..ir.dtypes import dtype
from ..ir.mesh import Mesh
from ..ir.types import Axes, TensorType
from ..ops.collective import Collective
from ..ops.control import Call
from ..source import Loc
from .fused import collectives, communicates
from .places import listed, named
from .stages import PIPELINE, stage_of

SEND, RECEIVE = "send", "receive"
_PLACED = ("axis", "group_size", "root")  # attributes that are fields of an event

Modules: TypeAlias = Module | Sequence[Module]


@dataclass(frozen=True, eq=False, slots=True)
class Event:
    """The part of one rank in one communication; ranks of a group share it if they run one module.

    `kind` is the name of the collective, or `send` or `receive`; then `group` is the sender and the
    receiver, else all ranks that take part, in rank order. `type` is that of the local operand.
    `root` is an index in the group. `how` holds the other attributes. `op` is the operation for
    messages: for transfers between stages, the call that makes the value.
    """

    kind: str
    axes: Axes
    group: tuple[int, ...]
    type: TensorType
    root: int | None
    how: tuple[tuple[str, Any], ...]
    op: Op

    @property
    def bytes(self) -> DimLike:
        """The bytes of one rank's operand; with symbols, half bytes are rounded up."""
        count = product(self.type.shape)
        bits = count * dtype(self.type.dtype).bits
        if isinstance(bits, int):
            return -(-bits // 8)
        whole = exact_divide(bits, 8)
        return count if whole is None else whole

    @property
    def place(self) -> Loc | None:
        """The location in the user's script."""
        return self.op.loc

    @property
    def form(self) -> tuple[object, ...]:
        """The fields that must be equal on all ranks of the group, besides the kind."""
        return (self.group, self.type, self.root, self.how)

    def __str__(self) -> str:
        if self.kind in (SEND, RECEIVE):
            source, target = self.group
            return f"{self.kind} of {self.type} from rank {source} to {target}, result of {self.at}"
        how = "".join(f", {name}={value}" for name, value in self.how)
        root = "" if self.root is None else f", root={self.root}"
        return f"{self.at} of {self.type} ({self.bytes} bytes) over {self.where}{root}{how}"

    @property
    def at(self) -> str:
        """The operation and its location."""
        return named(self.op)

    @property
    def where(self) -> str:
        """The axes with the ranks of the group."""
        return f"{'.'.join(self.axes)} ({listed(self.group)})"


@dataclass(frozen=True, slots=True)
class _Step:
    """One communication of the program, whichever ranks run it."""

    kind: str
    type: TensorType
    op: Op
    stage: int  # -1: all ranks
    target: int = -1  # the stage that a value goes to
    collective: Collective | None = None


def sequences(modules: Modules, function: str | None = None) -> list[list[Event]]:
    """The events of every rank, in program order.

    `modules` is one local module, which all ranks run, or a list with one per rank. `function`
    replaces the main function. A value for a later stage is sent and received right after the call
    that makes it, so that ranks cannot wait in a cycle.
    """
    if isinstance(modules, Module):
        found: list[list[Event]] = [[] for _ in range(modules.mesh.ranks)]
        for event in _events(modules, function):
            for rank in ranks_of(event):
                found[rank].append(event)
        return found
    check_alike_meshes(modules)
    known = {id(module): _events(module, function) for module in modules}
    return [
        [event for event in known[id(module)] if rank in ranks_of(event)]
        for rank, module in enumerate(modules)
    ]


def ranks_of(event: Event) -> tuple[int, ...]:
    """The ranks that run it."""
    if event.kind == SEND:
        return event.group[:1]
    return event.group[1:] if event.kind == RECEIVE else event.group


def check_alike_meshes(modules: Sequence[Module]) -> None:
    """An Error unless there is a module per rank, and all have the same mesh."""
    if not modules:
        raise Error("expected a module for all ranks, or one per rank, found none")
    mesh = modules[0].mesh
    for rank, module in enumerate(modules):
        if module.mesh != mesh:
            raise Error(
                f"the ranks must agree on the mesh, but that of rank 0 is ({mesh}) and that of "
                f"rank {rank} is ({module.mesh})"
            )
    if len(modules) != mesh.ranks:
        raise Error(f"{len(modules)} modules for the {mesh.ranks} ranks of ({mesh})")


def _chosen(module: Module, name: str | None) -> Function:
    if not module.local:
        raise Error(
            f"module @{module.name} is in the global view, which has no events per rank; "
            "localize it first"
        )
    if name is None:
        return module.main
    if name not in module.functions:
        raise Error(f"module @{module.name} has no function @{name}")
    return module.functions[name]


def _events(module: Module, name: str | None) -> list[Event]:
    """The events of all ranks, in the order of the program; a collective has one per group."""
    function, mesh = _chosen(module, name), module.mesh
    groups: dict[tuple[Axes, int], list[tuple[int, ...]]] = {}
    found: list[Event] = []
    for step in _steps(module, function):
        op = step.collective
        if op is None:
            found += _transfers(step, mesh)
            continue
        key = (op.axes, step.stage)
        if key not in groups:
            groups[key] = _groups(mesh, *key)
        how = tuple((n, v) for n, v in op.attributes.items() if n not in _PLACED)
        root: int | None = getattr(op, "root", None)
        for group in groups[key]:
            found.append(Event(step.kind, op.axes, group, step.type, root, how, step.op))
    return found


def _groups(mesh: Mesh, axes: Axes, stage: int) -> list[tuple[int, ...]]:
    """The groups over some axes; of one stage only, where one is named."""
    groups = [tuple(group) for group in mesh.groups(axes)]
    if stage < 0:
        return groups
    mesh.size(PIPELINE)  # an Error for an unknown axis
    return [group for group in groups if mesh.coordinates(group[0])[PIPELINE] == stage]


def _transfers(step: _Step, mesh: Mesh) -> Iterator[Event]:
    """Each rank of a stage sends to the rank of the same index in another stage."""
    for group in mesh.groups((PIPELINE,)):
        pair = (group[step.stage], group[step.target])
        for kind in (SEND, RECEIVE):
            yield Event(kind, (PIPELINE,), pair, step.type, None, (), step.op)


def _steps(module: Module, function: Function, stage: int = -1) -> Iterator[_Step]:
    """Every communication of one run of a function."""
    takers = _takers(function)
    for op in function:
        if isinstance(op, Call):
            inner = stage_of(op) if stage_of(op) >= 0 else stage
            yield from _steps(module, op.callee, inner)
            for value in op.results:
                for target in takers.get(value, ()):
                    yield _Step("transfer", value.type, op, inner, target)
        elif communicates(op):
            for part in collectives(op):
                yield _Step(part.opname, part.operands[0].type, op, stage, collective=part)


def _takers(function: Function) -> dict[Value, list[int]]:
    """Per value that a stage makes, the other stages that use it, in order of use."""
    takers: dict[Value, list[int]] = {}
    for op in function:
        stage = stage_of(op)
        for value in op.operands if stage >= 0 else ():
            maker = value.producer
            if maker is None or stage_of(maker) in (-1, stage):
                continue
            stages = takers.setdefault(value, [])
            if stage not in stages:
                stages.append(stage)
    return takers
