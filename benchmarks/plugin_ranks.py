"""What one rank does in benchmarks/plugin_collectives.py: a function per phase."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, TypeAlias

from benchmarks.plugin_cases import (
    MORE_DTYPES,
    Bench,
    Case,
    cases,
    fused_cases,
    run_case,
    run_softcap,
)
from irc.backends.cuda.calls import call_of, find_library
from irc.backends.cuda.device import CudaDriver, CudaStream
from irc.backends.cuda.group import Group, nccl_version, open_group, unique_id
from irc.backends.cuda.measure import median_us
from irc.backends.cuda.runtime import call
from irc.backends.cuda.watch import watched
from irc.backends.ranks.communicator import Communicator, PeerError
from irc.backends.ranks.threads import ThreadWorld
from irc.backends.tensorrt.plugins import communicators, load
from irc.backends.tensorrt.plugins.collective import FUSED, OPERATIONS, REDUCING, ROOTED

EXAMPLE = Path(__file__).parent.parent / "examples" / "custom_plugin.py"
REPEATED, ROUNDS = 20, 7
SIZES = (8 << 10, 64 << 10, 1 << 20)  # bytes of one rank's operand
MEETING = 40.0  # seconds: the first processes on a machine start slowly
STEPS = 40.0  # seconds in which a rank is lost
Tell: TypeAlias = Callable[[dict[str, Any]], None]


@dataclass
class Rank:
    """One rank of a phase: its communicator, its GPU, and where it reports to."""

    host: Communicator
    seed: int
    tell: Tell

    def __post_init__(self) -> None:
        self.driver = CudaDriver(self.host.local_rank)
        self.stream = self.driver.stream()

    @property
    def is_victim(self) -> bool:
        """Whether this is the rank that is lost."""
        return self.host.rank == self.host.ranks - 1

    def open(self, ranks: Sequence[int], label: str) -> Group:
        """A group, registered as the plugin finds it."""
        group = open_group(self.host, ranks, self.driver, label=label, meeting=MEETING)
        communicators.register(label, self.host.rank, group)
        return group

    def check_cases(self, labels: dict[str, Group], todo: Callable[[int], Sequence[Case]]) -> None:
        """Compare cases with numpy, and close the groups."""
        for label, group in labels.items():
            for case in todo(group.ranks):
                problem = run_case(self.driver, group, label, case, self.stream, self.seed)
                self.tell({"case": str(case), "group": label, "problem": problem})
        for group in labels.values():
            group.close()


def families(rank: Rank) -> dict[str, Group]:
    """By label: this rank's group of all ranks, of neighbours, and of ranks apart."""
    ranks = rank.host.ranks
    everyone = tuple(range(ranks))
    found = {"tp": [everyone]}
    if ranks >= 4 and ranks % 2 == 0:
        half = ranks // 2
        found["near"] = [everyone[:half], everyone[half:]]
        found["far"] = [everyone[0::2], everyone[1::2]]
    return {
        label: rank.open(members, label)
        for label, groups in found.items()
        for members in groups
        if rank.host.rank in members
    }


def run(host: Communicator, arguments: Sequence[str]) -> None:
    """One rank of a phase: (phase, folder, seed); it writes a line per report to rank{r}.jsonl."""
    phase, folder, seed = arguments
    lock = Lock()
    with (Path(folder) / f"rank{host.rank}.jsonl").open("w", encoding="utf-8") as file:

        def tell(report: dict[str, Any]) -> None:
            with lock:
                file.write(json.dumps(report) + "\n")
                file.flush()

        try:
            PHASES[phase](host, int(seed), tell)
            tell({"done": True})
        except BaseException as error:
            tell({"failed": f"{type(error).__name__}: {error}"})
            raise


def check(host: Communicator, seed: int, tell: Tell) -> None:
    """Every collective, dtype and sub-group against numpy, on a stream and in a graph."""
    rank, begin = Rank(host, seed, tell), time.perf_counter()
    groups = families(rank)
    seconds = time.perf_counter() - begin
    tell({"gpu": rank.driver.gpu.name, "nccl": nccl_version(), "meeting": seconds})
    rank.check_cases(groups, lambda size: [*cases(size), *cases(size, MORE_DTYPES)])


def fused(host: Communicator, seed: int, tell: Tell) -> None:
    """all_reduce + residual + rms_norm against numpy."""
    rank = Rank(host, seed, tell)
    rank.check_cases({"tp": rank.open(range(host.ranks), "tp")}, lambda size: [*fused_cases()])


def custom(host: Communicator, seed: int, tell: Tell) -> None:
    """The plugin of examples/custom_plugin.py against numpy."""
    load([EXAMPLE])
    rank = Rank(host, seed, tell)
    for kind in ("f32", "f16", "bf16"):
        for size in (1, 1001, 1 << 21):
            problem = run_softcap(rank.driver, kind, size, rank.stream, seed)
            tell({"case": f"SoftCap {kind} [{size}]", "group": "", "problem": problem})


def threads(host: Communicator, seed: int, tell: Tell) -> None:
    """All ranks as threads of one process, each with its GPU."""

    def one(own: Communicator) -> None:
        with communicators.act_as(own.rank):
            rank = Rank(own, seed, tell)
            rank.check_cases(families(rank), lambda size: [*cases(size, ("bf16", "i64"))])

    ThreadWorld(int(os.environ["IRC_BENCHMARK_RANKS"])).run(one)


def overhead(host: Communicator, seed: int, tell: Tell) -> None:
    """The time of the plugin over that of the bare call of NCCL, in a graph and on a stream."""
    rank = Rank(host, seed, tell)
    group, bare = rank.open(range(host.ranks), "tp"), bare_communicator(host)
    gc.disable()
    for operation in OPERATIONS:
        for size in SIZES:
            tell(timed(rank, group, operation, size, bare))
    gc.enable()


def bare_communicator(host: Communicator) -> Any:
    """NCCL's communicator of all ranks as a program without the plugin has it: calls block."""
    library = find_library()
    config = library.Config()
    config.blocking = 1
    data = host.broadcast(unique_id(library) if not host.rank else b"")
    return library.comm_init_rank_scalable(host.ranks, host.rank, 1, bytearray(data), config.ptr)


def usual_case(operation: str, size: int, group_size: int) -> Case:
    """A collective on operands of so many bytes, in bf16."""
    columns = 4096 if operation == FUSED else size // 2 // group_size
    rows = size // 2 // columns
    reduce_op = "sum" if operation in REDUCING else "none"
    root = 0 if operation in ROOTED else -1
    return Case(operation, "bf16", rows, columns, reduce_op, root, False, "bf16")


def timed(rank: Rank, group: Group, operation: str, size: int, comm: Any) -> dict[str, Any]:
    """Microseconds of the plugin and of the bare call, alternating; medians of this rank."""
    case, stream = usual_case(operation, size, group.ranks), rank.stream
    bench = Bench(rank.driver, group, "tp", case, stream)
    bench.load(1)
    kind = "all_reduce" if operation == FUSED else operation
    elements = case.rows * case.columns
    function, numbers = call_of(
        find_library(), kind, case.dtype, elements, group.ranks, case.reduce_op, case.root
    )
    source, target, handle = bench.inputs[0], bench.outputs[-1], stream.handle

    def bare() -> None:
        function(source, target, *numbers, comm, handle)

    pair = {"bare": bare, "plugin": bench.enqueue}
    for each in pair.values():
        each()
        stream.wait("warming up")
    found: dict[str, Any] = {"timed": operation, "bytes": size, "rank": group.rank}
    for how, measure in (("graph", graph_us), ("stream", stream_us)):
        each = measure(stream, pair)
        found |= {f"{how}_{key}": median(values) for key, values in each.items()}
        rounds = zip(each["bare"], each["plugin"], strict=True)
        found[f"{how}_over"] = median(theirs - ours for ours, theirs in rounds)
    bench.close()
    return found


def graph_us(stream: CudaStream, pair: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Microseconds per call inside a graph, a number per round."""
    graphs = {key: stream.capture(repeated(one, REPEATED)) for key, one in pair.items()}
    times: dict[str, list[float]] = {key: [] for key in pair}
    for _ in range(ROUNDS):
        for key, graph in graphs.items():
            times[key].append(median_us(stream, graph, 9, warm=2) / REPEATED)
    stream.wait("timing graphs")
    for graph in graphs.values():
        stream.drop(graph)
    return times


def stream_us(
    stream: CudaStream, pair: dict[str, Callable[[], None]], calls: int = 200
) -> dict[str, list[float]]:
    """Microseconds per call put on a stream one after the other, a number per round."""
    times: dict[str, list[float]] = {key: [] for key in pair}
    for _ in range(ROUNDS):
        for key, one in pair.items():
            stream.wait("timing")
            begin = time.perf_counter()
            repeated(one, calls)()
            stream.wait("timing")
            times[key].append(1e6 * (time.perf_counter() - begin) / calls)
    return times


def repeated(one: Callable[[], None], count: int) -> Callable[[], None]:
    """A function that calls another so many times."""

    def work() -> None:
        for _ in range(count):
            one()

    return work


def lose_in_graph(host: Communicator, seed: int, tell: Tell) -> None:
    """Replay a graph of collectives again and again, until a rank is lost."""
    rank, bench = _steady(host, seed, tell)
    graph = rank.stream.capture(repeated(bench.enqueue, 8))
    _until_lost(rank, lambda: rank.stream.launch(graph))


def lose_on_stream(host: Communicator, seed: int, tell: Tell) -> None:
    """The same with collectives put on a stream."""
    rank, bench = _steady(host, seed, tell)
    _until_lost(rank, bench.enqueue)


def lose_in_library(host: Communicator, seed: int, tell: Tell) -> None:
    """The same, blocked in a call that cannot be polled, under a watchdog."""
    rank, bench = _steady(host, seed, tell)
    graph = rank.stream.capture(bench.enqueue)

    def step() -> None:
        with watched(rank.driver.groups, "the step"):
            rank.stream.launch(graph)
            call("cudaStreamSynchronize", rank.stream.handle)

    _until_lost(rank, step)


def _steady(host: Communicator, seed: int, tell: Tell) -> tuple[Rank, Bench]:
    rank = Rank(host, seed, tell)
    group = rank.open(range(host.ranks), "tp")
    case = usual_case("all_reduce", 64 << 10, group.ranks)
    bench = Bench(rank.driver, group, "tp", case, rank.stream)
    bench.load(1)
    bench.enqueue()
    rank.stream.wait("warming up")
    return rank, bench


def _until_lost(rank: Rank, step: Callable[[], None]) -> None:
    rank.tell({"ready": True, "process": os.getpid()})
    end, lost = time.monotonic() + STEPS, ""
    try:
        while time.monotonic() < end:
            step()
            rank.stream.wait("the step")
    except PeerError as error:
        lost = error.message
    rank.tell({"lost": lost, "at": time.monotonic()})


def absent(host: Communicator, seed: int, tell: Tell) -> None:
    """The last rank never joins the group."""
    rank, begin, lost = Rank(host, seed, tell), time.monotonic(), ""
    try:
        if rank.is_victim:
            time.sleep(15)
            lost = "(this rank never joins)"
        else:
            rank.open(range(host.ranks), "tp")
    except PeerError as error:
        lost = error.message
    seconds = 0.0 if rank.is_victim else time.monotonic() - begin
    tell({"lost": lost, "at": time.monotonic(), "seconds": seconds})


PHASES: dict[str, Callable[[Communicator, int, Tell], None]] = {
    "check": check,
    "fused": fused,
    "overhead": overhead,
    "kill in a graph": lose_in_graph,
    "kill on a stream": lose_on_stream,
    "kill under a watchdog": lose_in_library,
    "stop in a graph": lose_in_graph,
    "a rank that never joins": absent,
    "threads": threads,
    "custom plugin": custom,
}
