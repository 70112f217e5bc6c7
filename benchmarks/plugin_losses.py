"""What a rank does in benchmarks/plugin_collectives.py while another one is lost or differs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.plugin_cases import Bench
from benchmarks.plugin_gpu import MEETING, Gpu, Job, Tell, open_groups, repeated, usual_case
from irc.backends.communicator import PeerError
from irc.backends.cuda.group import Group
from irc.backends.cuda.watch import Watchdog


def lose_in_graph(job: Job, tell: Tell) -> None:
    """Replay a graph of collectives again and again, until a peer is lost."""
    gpu, group, bench = _steady(job)
    graph = gpu.graph(bench.stream, repeated(bench.enqueue, 8))
    tell({"ready": True})

    def step() -> None:
        gpu.launch(graph, bench.stream)
        group.wait(bench.stream, "the step")

    _until_lost(step, tell)


def lose_on_stream(job: Job, tell: Tell) -> None:
    """The same with collectives put on a stream."""
    _, group, bench = _steady(job)
    tell({"ready": True})

    def step() -> None:
        bench.enqueue()
        group.wait(bench.stream, "the step")

    _until_lost(step, tell)


def lose_in_library(job: Job, tell: Tell) -> None:
    """The same, blocked in a call that cannot be polled, under a watchdog."""
    gpu, group, bench = _steady(job)
    graph = gpu.graph(bench.stream, bench.enqueue)
    dog = Watchdog([group])
    tell({"ready": True})

    def step() -> None:
        with dog.during("the step"):
            gpu.launch(graph, bench.stream)
            gpu.streams[bench.stream].wait()

    _until_lost(step, tell)


def _steady(job: Job) -> tuple[Gpu, Group, Bench]:
    gpu = Gpu(job.rank)
    ((label, group),) = open_groups(job).items()
    case = usual_case("all_reduce", 64 << 10, group.ranks)
    bench = Bench(gpu, group, label, case, gpu.stream())
    bench.load(1)
    bench.enqueue()
    group.wait(bench.stream, "warming up")
    return gpu, group, bench


def _until_lost(step: Callable[[], None], tell: Tell) -> None:
    steps, end = 0, time.monotonic() + 40
    try:
        while time.monotonic() < end:
            step()
            steps += 1
    except PeerError as error:
        tell({"lost": error.message, "at": time.monotonic(), "steps": steps})
        return
    tell({"lost": "", "at": time.monotonic(), "steps": steps})


def other_world(job: Job, tell: Tell) -> None:
    """The last rank believes in one rank more than there is."""
    Gpu(job.rank)
    ((_, (members, name)),) = job.groups.items()
    ranks = len(members) + (job.rank == job.victim)
    _refused(lambda: Group(name, job.rank, ranks, label="tp"), tell)


def other_artifact(job: Job, tell: Tell) -> None:
    """The last rank has another artifact."""
    Gpu(job.rank)
    ((_, (members, name)),) = job.groups.items()
    fact = "another" if job.rank == job.victim else "an artifact"
    _refused(
        lambda: Group(name, job.rank, len(members), label="tp", fact=fact, meeting=MEETING), tell
    )


def absent(job: Job, tell: Tell) -> None:
    """The last rank never comes."""
    Gpu(job.rank)
    ((_, (members, name)),) = job.groups.items()
    if job.rank == job.victim:
        tell({"lost": "(this one stays away)", "at": time.monotonic(), "seconds": 0.0})
        time.sleep(15)
        return
    _refused(lambda: Group(name, job.rank, len(members), label="tp"), tell)


def _refused(meet: Callable[[], Any], tell: Tell) -> None:
    begin = time.monotonic()
    try:
        meet()
    except PeerError as error:
        seconds = time.monotonic() - begin
        tell({"lost": error.message, "at": time.monotonic(), "seconds": seconds})
        return
    tell({"lost": "", "at": time.monotonic(), "seconds": time.monotonic() - begin})
