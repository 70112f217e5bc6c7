"""`time_operations`: what each operation of an artifact takes, by scope and beside its floor."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..analysis.communication import messages_of
from ..analysis.cost import cost_of, total
from ..analysis.machine import at_least, measure_cpu
from ..analysis.places import general
from ..analysis.sizes import LocalSizes, typical_sizes
from ..analysis.stages import Stage, stages_of
from ..analysis.steps import Step, named_operations
from ..analysis.topology import Device, Topology
from ..analysis.topology_file import default_topology
from ..artifact.folder import ArtifactFolder
from ..backends.recorder import Event, Recorder
from ..errors import Error
from ..ir.core import Module, Op
from .load import open_model
from .sources import artifact_of

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..backends.ranks.communicator import Communicator
    from ..generation.inputs import Arrays
    from ..generation.timing import Phase


@dataclass
class OperationTime:
    """Equal operations of equal layers: `scope` has * for the numbers in which theirs differ.

    Numbers are of one run and one rank; `us` of a collective has the time in which it waits for
    others. `calls` counts the `kernels`. `nbytes` is what has to be read and written in the dtypes
    of the module, and `floor_us` at most `us`, the time of that or of the arithmetic: 0 of
    collectives on a CPU, and of what belongs to no operation.
    """

    scope: str
    operation: str
    layers: int = 1
    calls: float = 0.0
    us: float = 0.0
    share: float = 0.0
    nbytes: float = 0.0
    floor_us: float = 0.0
    kernels: list[str] = field(default_factory=list[str])
    values: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class PhaseTimes:
    """The operations of a phase, the longest first, and microseconds of a run of it.

    `rest_us` is outside of all operations. `last` has the events of the last run with scope and
    operation, `steps` what is expected of the first rank of each stage; `ranks` are all of a stage
    by the first. `rates` are those of the floor.
    """

    phase: Phase
    us: float
    rest_us: float
    operations: list[OperationTime]
    last: list[tuple[Event, str, str]]
    steps: Sequence[Step]
    ranks: Mapping[int, Sequence[int]]
    rates: str


def time_operations(
    place: str | ArtifactFolder,
    inputs: Arrays | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    runs: int = 20,
    seed: int = 0,
    backend: str | None = None,
    **options: Any,
) -> list[PhaseTimes]:
    """The phases of an artifact, or of a module's text in numpy, with the times of operations.

    Without `inputs` they are random, at the sizes in `dims` or typical ones; without `dims` a
    language model gets one row of tokens. Options are those of `load`. Where ranks are processes,
    all of them call this, each with its `communicator`.
    """
    from ..backends import get
    from ..backends.reference import ReferenceProgram
    from ..generation.random_inputs import random_inputs
    from ..generation.timing import phases

    recorder, sizes = Recorder(), dict(dims or {})
    artifact = place if isinstance(place, ArtifactFolder) else artifact_of(place)
    used = get(backend or (artifact.backend if artifact is not None else "reference"))
    if not used.records:
        raise Error(
            f"the backend {used.name} does not time operations; compile for onnx or cuda, or "
            "choose --backend reference"
        )
    own = {"recorder": recorder} if used.name != "reference" else {}
    model = open_model(place, backend, **options, **own)
    if isinstance(model.program, ReferenceProgram):
        model.program.recorder = recorder
    assert model.module is not None  # of an artifact or a text
    module = model.module()
    arrays = random_inputs(module, seed, sizes) if inputs is None else inputs
    timed = phases(model, arrays, runs, given=inputs is not None, steps=True, sizes=sizes)
    events = _gathered(recorder.finish(), options.get("communicator"))
    return [_of_phase(module, phase, events, used) for phase in timed]


def _gathered(events: list[Event], communicator: Communicator | None) -> list[Event]:
    """The events of all ranks, which may be processes."""
    if communicator is None:
        return events
    own = json.dumps([astuple(event) for event in events]).encode()
    parts = (communicator.broadcast(own, rank) for rank in range(communicator.ranks))
    return [Event(*values) for part in parts for values in json.loads(part)]


def _of_phase(
    module: Module, phase: Phase, events: Sequence[Event], backend: Backend
) -> PhaseTimes:
    """The operations of a phase, from the events of its runs on all ranks."""
    stages = stages_of(module)
    rows = _Rows(stages, {event.rank for event in events}, len(phase.seconds))
    ends = [end for _, end in phase.windows]
    last: list[tuple[Event, str, str]] = []
    for event in events:
        run = bisect_left(ends, event.begin)  # another rank may begin a run before this one
        if 0 < run < len(ends):
            scope, operation = rows.add(event)
            last += [(event, scope, operation)] if run == len(ends) - 1 else []
    local = LocalSizes(module.mesh, typical_sizes(module, **phase.sizes), phase.past)
    topology = default_topology()
    steps, device = backend.commands.steps(module, local, topology), topology.device
    if not backend.rank_is_process:
        nbytes = sum(step.nbytes for step in steps)
        device = rows.at_least(measure_cpu(nbytes, module.mesh.ranks // len(stages)), local)
    us = 1e6 * sum(phase.seconds) / len(phase.seconds)
    rows.complete(us, local, topology, device, communicates=backend.rank_is_process)
    operations = sorted(rows.rows.values(), key=lambda row: -row.us)
    gflops, gb_s = device.peak("f32") / 1e3, device.hbm_gb_s
    return PhaseTimes(
        phase,
        us,
        us - sum(row.us for row in operations),
        operations,
        last,
        steps,
        {stage.ranks[0]: stage.ranks for stage in stages},
        f"{device.name}: {gflops:,.0f} GFLOP/s in f32, {gb_s:,.1f} GB/s of memory",
    )


class _Rows:
    """The rows of a table of operations, and the operations of each."""

    def __init__(self, stages: Sequence[Stage], recorded: set[int], runs: int) -> None:
        self.rows: dict[tuple[str, str], OperationTime] = {}
        self.operations: dict[tuple[str, str], dict[Op, None]] = {}
        self._makers: dict[int, dict[str, Op]] = {}  # by rank
        self._parts: dict[int, float] = {}  # of a rank in the mean of one run, over its stage's
        for stage in stages:
            of_stage = named_operations(stage.function)
            makers = {names[value]: op for op, names in of_stage for value in op.results}
            self._makers |= dict.fromkeys(stage.ranks, makers)
            ranks = recorded.intersection(stage.ranks)
            self._parts |= {rank: 1 / runs / len(ranks) for rank in ranks}

    def add(self, event: Event) -> tuple[str, str]:
        """Add an event to its row; the scope and the name of its operation."""
        op = maker_of(event.value, self._makers[event.rank])
        scope = op.loc.scope if op is not None and op.loc is not None else ""
        key = general(scope), event.kernel if op is None else op.opname
        row, part = self.rows.setdefault(key, OperationTime(*key)), self._parts[event.rank]
        row.us += event.us * part
        row.calls += part
        row.kernels += [event.kernel] if event.kernel not in row.kernels else []
        row.values += [event.value] if event.value not in row.values else []
        self.operations.setdefault(key, {}).update({} if op is None else {op: None})
        return scope, key[1]

    def at_least(self, device: Device, local: LocalSizes) -> Device:
        """A device as fast as the fastest row: other programs may have run beside its measuring."""
        costs = {
            key: total(cost_of(op, local) for op in ops) for key, ops in self.operations.items()
        }
        pairs = [(cost, self.rows[key].us) for key, cost in costs.items() if self.rows[key].us]
        gb_s = max((cost.bytes / us / 1e3 for cost, us in pairs), default=0.0)
        tflops = max((cost.flops / us / 1e6 for cost, us in pairs), default=0.0)
        return at_least(device, gb_s, tflops)

    def complete(
        self, us: float, local: LocalSizes, topology: Topology, device: Device, communicates: bool
    ) -> None:
        """Fill in layers, bytes, floors and shares of a run of `us`."""
        for key, row in self.rows.items():
            ops = self.operations[key]
            costs = [replace(cost_of(op, local), kernels=0) for op in ops]
            sent = [message for op in ops for message in messages_of(op, local, topology)]
            floor = sum(cost.time(device) for cost in costs)
            floor += sum(message.us for message in sent) * communicates
            scopes = {op.loc.scope for op in ops if op.loc is not None} or {""}
            row.scope = row.scope if len(scopes) > 1 else scopes.pop()
            row.layers = max(1, len(scopes))
            row.nbytes = sum(cost.bytes for cost in costs)
            row.nbytes += sum(message.sent for message in sent)
            row.floor_us, row.share = min(floor, row.us), row.us / us


def maker_of(value: str, makers: Mapping[str, Op]) -> Op | None:
    """The operation that computes a value, or of which the value is a part; see Event."""
    while value and value not in makers:
        value = value.rpartition("/")[0]
    return makers.get(value)
