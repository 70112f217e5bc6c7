"""What one rank (a process with a GPU) does in benchmarks/plugin_collectives.py."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from threading import Lock, Thread
from typing import Any

from benchmarks import plugin_losses as losses
from benchmarks.plugin_cases import MORE_DTYPES, Bench, cases, fused_cases, run_case, run_softcap
from benchmarks.plugin_gpu import (
    Gpu,
    Job,
    Tell,
    bare_communicator,
    open_groups,
    repeated,
    usual_case,
)
from irc.backends.cuda.calls import call_of, find_library
from irc.backends.cuda.group import Group, nccl_version
from irc.backends.cuda.runtime import DeviceArray
from irc.backends.cuda.watch import wait
from irc.backends.tensorrt.plugins import communicators, load
from irc.backends.tensorrt.plugins.collective import FUSED, OPERATIONS

EXAMPLE = Path(__file__).parent.parent / "examples" / "custom_plugin.py"
REPEATED, ROUNDS = 20, 7
SIZES = (8 << 10, 64 << 10, 1 << 20)  # bytes of one rank's operand


def work(job: Job, parent: Any) -> None:
    """The process of one rank; it leaves without waiting for anything."""
    status, speaking = 0, Lock()

    def tell(what: dict[str, Any]) -> None:
        with speaking:
            parent.send(what)

    try:
        PHASES[job.phase](job, tell)
        parent.send({"done": True})
    except BaseException as error:
        status = 1
        parent.send({"failed": f"{error}", "trace": traceback.format_exc()})
    parent.close()
    os._exit(status)


def check(job: Job, tell: Tell) -> None:
    """Every collective, dtype and sub-group against numpy, on a stream and in a graph."""
    gpu = Gpu(job.rank)
    begin = time.perf_counter()
    groups = open_groups(job)
    tell({"gpu": gpu.name, "nccl": nccl_version(), "meeting": time.perf_counter() - begin})
    stream = gpu.stream()
    for label, group in groups.items():
        for case in [*cases(group.ranks), *cases(group.ranks, MORE_DTYPES)]:
            problem = run_case(gpu, group, label, case, stream, job.seed)
            tell({"case": str(case), "group": label, "problem": problem})
    for group in groups.values():
        group.close()


def fused(job: Job, tell: Tell) -> None:
    """all_reduce + residual + rms_norm against numpy."""
    gpu = Gpu(job.rank)
    groups = open_groups(job)
    stream = gpu.stream()
    for label, group in groups.items():
        for case in fused_cases():
            problem = run_case(gpu, group, label, case, stream, job.seed)
            tell({"case": str(case), "group": label, "problem": problem})
    for group in groups.values():
        group.close()


def custom(job: Job, tell: Tell) -> None:
    """The plugin of examples/custom_plugin.py against numpy."""
    load([EXAMPLE])
    gpu = Gpu(job.rank)
    stream = gpu.stream()
    for kind in ("f32", "f16", "bf16"):
        for size in (1, 1001, 1 << 21):
            problem = run_softcap(gpu, kind, size, stream, job.seed)
            tell({"case": f"SoftCap {kind} [{size}]", "group": "", "problem": problem})


def threads(job: Job, tell: Tell) -> None:
    """All ranks as threads of one process, each with its GPU."""
    failed: list[str] = []

    def one(rank: int) -> None:
        try:
            with communicators.act_as(rank):
                mine = Job(job.phase, rank, job.ranks, job.groups, job.seed, job.victim)
                gpu = Gpu(rank)
                groups = open_groups(mine)
                stream = gpu.stream()
                for label, group in groups.items():
                    for case in cases(group.ranks, ("bf16", "i64")):
                        problem = run_case(gpu, group, label, case, stream, job.seed)
                        tell({"case": str(case), "group": label, "problem": problem})
                for group in groups.values():
                    group.close()
        except BaseException:
            failed.append(traceback.format_exc())

    started = [Thread(target=one, args=(rank,), daemon=True) for rank in range(job.ranks)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    if failed:
        raise RuntimeError(failed[0])


def overhead(job: Job, tell: Tell) -> None:
    """The plugin's time over that of the bare call of NCCL, in a graph and on a stream."""
    gpu = Gpu(job.rank)
    groups = open_groups(job)
    ((label, group),) = groups.items()
    stream, comm = gpu.stream(), bare_communicator(job)
    gc.disable()
    for operation in OPERATIONS:
        for size in SIZES:
            tell(timed(gpu, group, label, operation, size, stream, comm))
    tell(public(gpu, group, stream))
    gc.enable()


def timed(
    gpu: Gpu, group: Group, label: str, operation: str, size: int, stream: int, comm: Any
) -> dict[str, Any]:
    """Microseconds of the plugin and of the bare call, alternating; medians of this rank."""
    case = usual_case(operation, size, group.ranks)
    bench = Bench(gpu, group, label, case, stream)
    bench.load(1)
    library = find_library()
    kind = "all_reduce" if operation == FUSED else operation
    elements = case.rows * case.columns
    function, numbers = call_of(
        library, kind, case.dtype, elements, group.ranks, case.reduce_op, case.root
    )
    source, target = bench.inputs[0], bench.outputs[-1]

    def bare() -> None:
        function(source, target, *numbers, comm, stream)

    plugin = bench.enqueue
    for each in (plugin, bare):
        each()
        wait(stream, [group], "warming up")
    pair = {"bare": bare, "plugin": plugin}
    found: dict[str, Any] = {"timed": operation, "bytes": size, "rank": group.rank}
    for how, measure in (("graph", graph_us), ("stream", stream_us)):
        each = measure(gpu, group, stream, pair)
        found |= {f"{how}_{key}": median(values) for key, values in each.items()}
        rounds = zip(each["bare"], each["plugin"], strict=True)
        found[f"{how}_over"] = median(theirs - ours for ours, theirs in rounds)
    bench.close()
    return found


def graph_us(
    gpu: Gpu, group: Group, stream: int, pair: dict[str, Callable[[], None]]
) -> dict[str, list[float]]:
    """Microseconds per call inside a graph, a number per round."""

    graphs = {key: gpu.graph(stream, repeated(one, REPEATED)) for key, one in pair.items()}
    times: dict[str, list[float]] = {key: [] for key in pair}
    for _ in range(ROUNDS):
        for key, graph in graphs.items():
            us = gpu.streams[stream].median_us(graph, 9, warm=2)
            times[key].append(us / REPEATED)
    wait(stream, [group], "timing graphs")
    for graph in graphs.values():
        gpu.drop(graph)
    return times


def stream_us(
    gpu: Gpu, group: Group, stream: int, pair: dict[str, Callable[[], None]], calls: int = 200
) -> dict[str, list[float]]:
    """Microseconds per call put on a stream one after the other, a number per round."""
    times: dict[str, list[float]] = {key: [] for key in pair}
    for _ in range(ROUNDS):
        for key, one in pair.items():
            wait(stream, [group], "timing")
            begin = time.perf_counter()
            for _ in range(calls):
                one()
            wait(stream, [group], "timing")
            times[key].append(1e6 * (time.perf_counter() - begin) / calls)
    return times


def public(gpu: Gpu, group: Group, stream: int) -> dict[str, Any]:
    """The same all_reduce through nccl4py's arrays, for comparison."""
    import numpy as np

    size = SIZES[0]
    source = DeviceArray(np.zeros(size // 2, np.float16))
    target = DeviceArray(np.zeros(size // 2, np.float16))

    def one() -> None:
        group.enqueue("all_reduce", source, target, stream)

    one()
    times = stream_us(gpu, group, stream, {"arrays": one}, 50)
    return {"public": median(times["arrays"]), "bytes": size, "rank": group.rank}


PHASES: dict[str, Callable[[Job, Tell], None]] = {
    "check": check,
    "fused": fused,
    "overhead": overhead,
    "kill in a graph": losses.lose_in_graph,
    "kill on a stream": losses.lose_on_stream,
    "kill under a watchdog": losses.lose_in_library,
    "stop in a graph": losses.lose_in_graph,
    "another world": losses.other_world,
    "another artifact": losses.other_artifact,
    "a rank that never comes": losses.absent,
    "threads": threads,
    "custom plugin": custom,
}
