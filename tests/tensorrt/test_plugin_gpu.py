"""Plugins on real GPUs, driven as TensorRT drives them: numbers, and how a lost rank is noticed.

Each rank is a process, in which `benchmarks.process` calls `run`. It writes what is wrong, or how
it noticed that the last rank was lost, into FOLDER/rank{RANK}.json.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.backends.cuda.device import CudaDriver
from irc.backends.cuda.group import Group, open_group
from irc.backends.cuda.runtime import call, device_count
from irc.backends.cuda.watch import watched
from irc.backends.ranks.communicator import Communicator, PeerError
from irc.backends.ranks.threads import ThreadWorld
from irc.backends.tensorrt.plugins import Instance, TensorDesc, find, load
from irc.ir.dtypes import numpy_dtype
from tests.fresh import fresh
from tests.gpu_ranks import ran
from tests.layout import ROOT
from tests.tensorrt.plugin_cases import (
    MORE_DTYPES,
    TOLERANCE,
    Bench,
    Case,
    cases,
    fused_cases,
    run_case,
    size_of,
)
from tests.tensorrt.plugin_host import PluginHost

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_count() < 2, reason="collectives need two GPUs"),
]
MEETING = 40.0  # seconds: the first processes on a machine start slowly
STEPS = 30.0  # seconds in which a loss is noticed, or never
LIMIT = 10.0  # seconds in which a loss has to be noticed


@dataclass
class Rank:
    """One rank: its communicator, its GPU and a stream."""

    host: Communicator
    seed: int

    def __post_init__(self) -> None:
        self.driver = CudaDriver(self.host.local_rank)
        self.stream = self.driver.stream()

    def open(self, ranks: Sequence[int], label: str) -> Group:
        """A group of ranks."""
        return open_group(self.host, ranks, self.driver, label=label, meeting=MEETING)

    def groups(self) -> dict[str, Group]:
        """By label: this rank's group of all ranks, of neighbours, and of ranks apart."""
        ranks = tuple(range(self.host.ranks))
        families = {"tp": [ranks]}
        if len(ranks) >= 4 and len(ranks) % 2 == 0:
            half = len(ranks) // 2
            families |= {"near": [ranks[:half], ranks[half:]], "far": [ranks[0::2], ranks[1::2]]}
        return {
            label: self.open(members, label)
            for label, family in families.items()
            for members in family
            if self.host.rank in members
        }

    def problems(
        self, groups: dict[str, Group], cases_of: Callable[[int], Iterable[Case]]
    ) -> list[str]:
        """The results that differ from numpy's; closes the groups."""
        wrong = [
            f"group {label}: {problem}"
            for label, group in groups.items()
            for case in cases_of(group.ranks)
            if (problem := run_case(self.driver, group, label, case, self.stream, self.seed))
        ]
        for group in groups.values():
            group.close()
        return wrong


def run(host: Communicator, arguments: Sequence[str]) -> None:
    """One rank: (folder, seed, a name of NUMBERS or of LOSSES)."""
    folder, seed, name = Path(arguments[0]), int(arguments[1]), arguments[2]
    rank = Rank(host, seed)
    file = folder / f"rank{host.rank}.json"
    if name in NUMBERS:
        file.write_text(json.dumps(NUMBERS[name](rank)))
        return
    try:
        LOSSES[name](rank, folder / "lost")
        raise AssertionError("no rank noticed the loss")
    except PeerError as error:
        begin = float((folder / "lost").read_text())
        file.write_text(json.dumps([time.monotonic() - begin, error.message]))
        raise


def collectives(rank: Rank) -> list[str]:
    """Every collective, dtype and group, and all_reduce with a norm behind it."""
    return rank.problems(
        rank.groups(), lambda size: [*cases(size), *cases(size, MORE_DTYPES), *fused_cases()]
    )


def threads(rank: Rank) -> list[str]:
    """All ranks as threads of one process, each with its GPU."""

    def work(host: Communicator) -> list[str]:
        own = Rank(host, rank.seed)
        return own.problems(own.groups(), lambda size: cases(size, ("bf16", "i64")))

    return [*chain.from_iterable(ThreadWorld(device_count()).run(work))]


def custom(rank: Rank) -> list[str]:
    """The plugin of examples/custom_plugin.py, in a graph."""
    load([ROOT / "examples" / "custom_plugin.py"])
    found = [softcap(rank, kind, n) for kind in ("f32", "f16", "bf16") for n in (1, 1001, 1 << 21)]
    return list(filter(None, found))


def softcap(rank: Rank, kind: str, size: int) -> str:
    """What is wrong with a result; empty if nothing is."""
    driver, stream, cap = rank.driver, rank.stream, 30.0
    plugin = find("SoftCap", namespace="example")
    host = PluginHost(plugin.name, Instance(plugin, {"cap": cap}).texts(), plugin.namespace)
    (desc,) = host.shapes([TensorDesc((size,), kind)])
    source, target = driver.allocate(size_of(desc)), driver.allocate(size_of(desc))
    x = (np.random.default_rng(rank.seed).standard_normal(size) * 50).astype(numpy_dtype(kind))
    y = np.empty_like(x)
    host.enqueue([source], [target], stream.handle)
    graph = stream.capture(lambda: host.enqueue([source], [target], stream.handle))
    stream.upload(source, x)
    stream.launch(graph)
    stream.download(y, target)
    stream.wait("SoftCap")
    stream.drop(graph)
    driver.free(source)
    driver.free(target)
    wanted = cap * np.tanh(x.astype("f4") / cap)
    error = float(np.abs(y.astype("f8") - wanted.astype("f8")).max()) / cap
    return "" if error <= TOLERANCE[kind] else f"SoftCap {kind} [{size}] differs by {error:.2e}"


NUMBERS: dict[str, Callable[[Rank], list[str]]] = {
    "collectives": collectives,
    "threads": threads,
    "custom": custom,
}


# ---- losses


def lose(rank: Rank, began: Path, how: str, number: signal.Signals) -> None:
    """Kill or stop the last rank while all repeat an all_reduce, until that fails."""
    group, stream = rank.open(range(rank.host.ranks), "tp"), rank.stream
    bench = Bench(rank.driver, group, "tp", Case("all_reduce", "bf16", 8, 4096, "sum", -1, False),
                  stream)  # fmt: skip
    bench.load(1)
    bench.enqueue()
    stream.wait("warming up")
    graph = stream.capture(bench.enqueue)

    def step() -> None:
        if how == "stream":
            bench.enqueue()
        elif how == "graph":
            stream.launch(graph)
        else:  # blocked in a call that cannot be polled
            with watched(rank.driver.groups, "the step"):
                stream.launch(graph)
                call("cudaStreamSynchronize", stream.handle)
        stream.wait("the step")

    for _ in range(100):
        step()
    if rank.host.rank == rank.host.ranks - 1:
        began.write_text(str(time.monotonic()))
        os.kill(os.getpid(), number)
    end = time.monotonic() + STEPS
    while time.monotonic() < end:
        step()


def absent(rank: Rank, began: Path) -> None:
    """The last rank never joins the group."""
    if rank.host.rank == rank.host.ranks - 1:
        time.sleep(STEPS)
        return
    began.write_text(str(time.monotonic()))
    rank.open(range(rank.host.ranks), "tp")


LOSSES: dict[str, Callable[[Rank, Path], None]] = {
    "killed, in a graph": lambda rank, began: lose(rank, began, "graph", signal.SIGKILL),
    "killed, on a stream": lambda rank, began: lose(rank, began, "stream", signal.SIGKILL),
    "killed, under a watchdog": lambda rank, began: lose(rank, began, "watchdog", signal.SIGKILL),
    "stopped, in a graph": lambda rank, began: lose(rank, began, "graph", signal.SIGSTOP),
    "absent": absent,
}


def written(processes: int, name: str, folder: Path) -> tuple[int, dict[int, Any], str]:
    """(exit status, what each rank wrote, standard error) of a run."""
    seed = str(fresh().integers(1 << 30))
    status, err = ran(processes, "tests.tensorrt.test_plugin_gpu", folder, seed, name)
    found = {int(f.stem[4:]): json.loads(f.read_text()) for f in folder.glob("rank*.json")}
    return status, found, err


@pytest.mark.parametrize("name", NUMBERS)
def test_results_are_those_of_numpy(name: str, tmp_path: Path) -> None:
    processes = 1 if name == "threads" else device_count()
    status, found, err = written(processes, name, tmp_path)
    assert (status, found) == (0, {rank: [] for rank in range(processes)}), err


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_rank_is_noticed_by_all_others(name: str, tmp_path: Path) -> None:
    last = device_count() - 1
    status, found, err = written(last + 1, name, tmp_path)
    assert status and sorted(set(found) - {last}) == list(range(last)), err
    assert all(found[rank][0] < LIMIT for rank in range(last)), found
