"""A rank of benchmarks/plugin_collectives.py: its job, its GPU, its communicators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benchmarks.plugin_cases import Case
from irc.backends.cuda.calls import find_library
from irc.backends.cuda.driver import Cuda
from irc.backends.cuda.group import Group
from irc.backends.cuda.runtime import Stream, call, use_device
from irc.backends.tensorrt.plugins import communicators
from irc.backends.tensorrt.plugins.collective import FUSED, REDUCING, ROOTED

Tell: TypeAlias = Callable[[dict[str, Any]], None]
BARE = "bare"  # the label of the communicator that is not the plugin's
MEETING = 40.0  # seconds: the first processes on a machine start slowly


@dataclass(frozen=True)
class Job:
    """What a rank is to do. `groups`: label -> (members, name); `victim` is the rank that goes."""

    phase: str
    rank: int
    ranks: int
    groups: dict[str, tuple[tuple[int, ...], bytes]]
    seed: int
    victim: int


@dataclass
class Gpu:
    """The Machine of benchmarks/plugin_cases.py that is a GPU."""

    index: int
    streams: dict[int, Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = use_device(self.index)
        self.driver = Cuda()

    def stream(self) -> int:
        """A new stream."""
        made = Stream()
        self.streams[int(made)] = made
        return int(made)

    def graph(self, stream: int, work: Callable[[], None]) -> Any:
        """What `work` puts on the stream, as a graph."""
        return self.streams[stream].graph(work)

    def launch(self, graph: Any, stream: int) -> None:
        """Put a graph on a stream."""
        call("cudaGraphLaunch", graph, stream)

    def drop(self, graph: Any) -> None:
        """Give a graph up."""
        call("cudaGraphExecDestroy", graph)


def open_groups(job: Job, meeting: float = MEETING) -> dict[str, Group]:
    """The communicators of this rank, registered as the plugin finds them."""
    found: dict[str, Group] = {}
    for key, (members, name) in job.groups.items():
        if job.rank not in members:
            continue
        label = key.split("/")[0]
        if label == BARE:
            continue
        group = Group(name, members.index(job.rank), len(members), label=label, meeting=meeting)
        found[label] = group
        communicators.register(label, job.rank, group)
    return found


def bare_communicator(job: Job) -> Any:
    """NCCL's own of all ranks as a program without the plugin has it: calls block."""
    library = find_library()
    config = library.Config()
    config.blocking = 1
    ((members, name),) = (each for key, each in job.groups.items() if key.startswith(BARE))
    return library.comm_init_rank_scalable(len(members), job.rank, 1, bytearray(name), config.ptr)


def usual_case(operation: str, size: int, ways: int) -> Case:
    """A collective on operands of so many bytes, in bf16."""
    columns = 4096 if operation == FUSED else size // 2 // ways
    rows = size // 2 // columns
    reduce_op = "sum" if operation in REDUCING else "none"
    root = 0 if operation in ROOTED else -1
    return Case(operation, "bf16", rows, columns, reduce_op, root, False, "bf16")


def repeated(one: Callable[[], None], count: int) -> Callable[[], None]:
    """It, so many times."""

    def work() -> None:
        for _ in range(count):
            one()

    return work
